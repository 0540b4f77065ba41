"""What several places hold together: which step is whole, which is passed over and why, what may go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from small_checkpoints import make_store, save, save_spread

from coremill.checkpoint.agreement import Whole, join_views, view_of
from coremill.checkpoint.fetch import plan_transfers
from coremill.checkpoint.manifest import survey
from coremill.checkpoint.places import Places
from coremill.config.schema import CheckpointSection, RunConfig
from coremill.run.attempts import committed_step, origin_in_words

HOSTS = ("one", "two", "three")
FILES = ("rank-0", "rank-1", "rank-2")


def held(step: int, here: str, *, digest: str = "d", files: tuple[str, ...] = FILES) -> dict[str, Any]:
    """What a place says of one step; `here` names its files by their numbers."""
    mine = [f"rank-{number}" for number in here]
    away = {file: f"{file} is missing" for file in files if file not in mine}
    return {"name": f"step-{step:08d}", "digest": digest, "here": mine, "away": away, "spread": True}


def view(*steps: dict[str, Any], passed_over: list[list[str]] | None = None) -> dict[str, Any]:
    return {"held": list(steps), "passed_over": passed_over or []}


def test_a_step_is_whole_where_every_file_is_somewhere():
    found = join_views({0: view(held(10, "0"), held(20, "0")), 1: view(held(10, "12"))}, HOSTS)
    assert [each.name for each in found.whole] == ["step-00000010"]
    assert found.whole[0].holders == {"rank-0": (0,), "rank-1": (1,), "rank-2": (1,)}
    assert [str(each) for each in found.passed_over] == [
        "checkpoint step-00000020 passed over: rank-1 is missing, and 1 more with it"
    ]


def test_parts_of_different_saves_are_never_joined():
    found = join_views({0: view(held(10, "0", digest="a")), 1: view(held(10, "12", digest="b"))}, HOSTS)
    assert found.whole == ()
    assert "of different saves" in found.passed_over[0].reason


def test_a_whole_save_wins_over_a_part_of_another():
    views = {0: view(held(10, "0", digest="a")), 1: view(held(10, "012", digest="b")), 2: view(held(10, "1"))}
    (whole,) = join_views(views, HOSTS).whole
    assert whole.digest == "b" and set(whole.holders.values()) == {(1,)}


def test_what_a_place_says_of_its_own_folder_is_told_with_its_name():
    broken = view(passed_over=[["step-00000010", "manifest.json was altered"]])
    found = join_views({0: view(held(10, "01")), 1: broken}, HOSTS)
    assert found.passed_over[0].reason == "on two: manifest.json was altered"
    assert join_views({0: view(held(10, "012")), 1: broken}, HOSTS).passed_over == ()
    assert join_views({0: broken}, HOSTS).passed_over[0].reason == "manifest.json was altered"


def test_older_ones_go_only_when_enough_are_whole_over_all_places():
    views = {0: view(held(30, "0"), held(20, "0"), held(10, "0")), 1: view(held(30, "12"), held(10, "12"))}
    found = join_views(views, HOSTS)
    assert found.kept(2, frozenset()) == ["step-00000030", "step-00000010"]
    assert found.kept(3, frozenset()) is None
    assert found.kept(2, frozenset({"step-00000010"})) is None


def test_files_that_turn_out_bad_are_taken_elsewhere_or_lost():
    whole = Whole("step-00000010", "d", {"a": (0, 1), "b": (1,)})
    assert whole.without({0: {"a"}}).holders == {"a": (1,), "b": (1,)}
    assert whole.without({1: None}).lost == ["b"]


def test_views_of_real_folders_agree(tmp_path):
    """A save in one folder is whole by itself; spread, each folder has its part, and neither counts alone."""
    together = save(make_store(tmp_path), 7)
    assert [each.name for each in join_views({0: view_of(survey(together.folder.parent))}, HOSTS).whole] == [
        "step-00000007"
    ]
    stores = save_spread(tmp_path, 7)
    views = {place: view_of(survey(store.folder)) for place, store in enumerate(stores)}
    for store, seen in zip(stores, views.values(), strict=True):
        (part,) = survey(store.folder).sound
        assert part.state()["step"] == 7 and len(part.away) == 1
        found = join_views({0: seen}, HOSTS)
        assert found.whole == () and found.is_spread
        store.prune(1)
        assert survey(store.folder).sound, "a part is not counted, but not removed either"
    missing = "rank-00001-of-00002.safetensors is missing (host-1 wrote it)"
    assert join_views({0: views[0]}, HOSTS).passed_over[0].reason == missing
    (whole,) = join_views(views, HOSTS).whole
    assert whole.holders["state.json"] == (0, 1)


def test_a_host_with_a_part_sees_that_the_run_gets_on_and_leaves_the_step_to_the_ranks(tmp_path):
    own = save_spread(tmp_path, 7)[1].folder
    shared = save(make_store(tmp_path), 5).folder.parent
    for folder, nodes, step, words in (
        (own, 2, 7, "the newest step that is whole over all hosts"),
        (tmp_path / "none", 2, 0, "the newest step that is whole over all hosts"),
        (tmp_path / "none", 1, 0, "the start"),
        (shared, 2, 5, "step 5"),
    ):
        config = RunConfig(checkpoint=CheckpointSection(folder=str(folder)))
        assert committed_step(config, tmp_path) == step
        assert origin_in_words(config, tmp_path, nodes) == words


@pytest.mark.parametrize("of_rank", [(0, 1, 2), (0, 0, 2), (0, 1, 0)])
def test_every_lacking_file_is_sent_once_between_different_places(of_rank):
    places = Places(of_rank, HOSTS, 0)
    holders = {f"rank-{rank}": (of_rank[rank],) for rank in range(3)}
    lacking = {place: [file for file in FILES if place not in holders[file]] for place in places.leaders}
    files: Any = {file: SimpleNamespace(name=file) for file in FILES}
    sent = plan_transfers(lacking, Whole("step-00000010", "d", holders), files, places)
    assert sorted((of_rank[each.target], each.file.name) for each in sent) == sorted(
        (place, file) for place, names in lacking.items() for file in names
    )
    for each in sent:
        assert of_rank[each.source] in holders[each.file.name] and of_rank[each.source] != of_rank[each.target]
