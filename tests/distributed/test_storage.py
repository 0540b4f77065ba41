"""Real ranks on bad storage: full, gone, hanging. Training goes on, every rank is told, none counts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ranks
from coremill.checkpoint.manifest import survey
from coremill.checkpoint.resume import find_resume_point
from coremill.checkpoint.saver import STILL_HANGS
from coremill.errors import InputError
from saved_training import Events, train_saved
from tiny_models import make_model
from training import make_packed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("storage")
    make_model(folder / "llama", "llama")
    data = make_packed(folder / "data", rows=128, length=16, vocabulary=90)
    inputs = {"model_folder": str(folder / "llama"), "data": data.to_json()}
    reference = ranks.run_ranks(train_saved, 2, folder=str(folder / "reference"), every="never", **inputs)
    return {**inputs, "digest": reference[0]["digest"]}


def run(inputs: dict[str, Any], folder: Path, **settings: Any) -> list[dict[str, Any]]:
    given = {name: inputs[name] for name in ("model_folder", "data")}
    return ranks.run_ranks(train_saved, 2, folder=str(folder), **given, **settings)


def saves(result: dict[str, Any]) -> dict[int, str]:
    """By step: saved, or why not."""
    told = [event for event in result["events"] if event["kind"] == "save"]
    assert len({event["step"] for event in told}) == len(told), "told twice"
    return {event["step"]: "saved" if event["saved"] else event["reason"] for event in told}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, with room for a few checkpoints."""
    (tmp_path / "checkpoints").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=755", "tmpfs", str(tmp_path / "checkpoints")]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path / "checkpoints")], check=True)


def test_a_full_disk_ends_nothing_and_saves_go_on_when_there_is_room(inputs, small_disk):
    results = run(inputs, small_disk, storage={7: "fill", 9: "free"})
    for result in results:
        told = saves(result)
        assert [told[step] for step in (4, 12, 16)] == ["saved"] * 3
        assert result["ended"] == "done" and result["digest"] == inputs["digest"]
    assert "the disk is too full" in saves(results[0])[8] and "bytes needed, 0 free" in saves(results[0])[8]
    assert "the disk is too full" in saves(results[1])[8]
    assert [each.step for each in survey(small_disk / "checkpoints").sound] == [16, 12]
    assert not list((small_disk / "checkpoints").glob(".*"))


def test_a_folder_that_goes_away_ends_nothing(inputs, tmp_path):
    for result in run(inputs, tmp_path, storage={6: "hide", 9: "show"}):
        told = saves(result)
        assert told[8] != "saved" and [told[step] for step in (4, 12, 16)] == ["saved"] * 3
        assert result["ended"] == "done" and result["digest"] == inputs["digest"]


@pytest.mark.parametrize("hang_rank", [0, 1])
def test_a_save_that_hangs_is_given_up_on_every_rank(inputs, tmp_path, hang_rank):
    for result in run(inputs, tmp_path, hang_at=8, hang_rank=hang_rank, deadline="3s", deadline_from=8):
        told = saves(result)
        assert told[4] == "saved"
        assert told[8] == "the storage did not take it within 3 s (supervise.save_deadline)"
        # Whether step 12 comes before or after the deadline of step 8 is up to the machine.
        still, slow = "the storage still hangs on an earlier save", "the save before it has not ended"
        assert told[12] == still or told[12].startswith(slow)
        assert told[16] == still
        assert result["ended"] == "done" and result["digest"] == inputs["digest"]
    assert [each.step for each in survey(tmp_path / "checkpoints").sound] == [4]


def test_a_save_that_was_given_up_never_commits(inputs, tmp_path):
    """All is written, rank 0 is about to rename, the storage hangs until the save was given up, and comes back."""
    for result in run(inputs, tmp_path, late_commit_at=16, deadline="3s", deadline_from=16):
        told = saves(result)
        assert [told[step] for step in (4, 8, 12)] == ["saved"] * 3
        assert told[16] == "the storage did not take it within 3 s (supervise.save_deadline)"
    assert [each.step for each in survey(tmp_path / "checkpoints").sound] == [12, 8]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_what_is_renamed_is_saved_though_tidying_up_hangs(inputs, tmp_path):
    for result in run(inputs, tmp_path, hang_in_prune=True, deadline="15s", settle_before=8):
        told = saves(result)
        assert told[4] == told[8] == "saved"
        assert result["ended"] == "done" and result["digest"] == inputs["digest"]
    steps = [step for step, how in sorted(told.items(), reverse=True) if how == "saved"]
    assert [each.step for each in survey(tmp_path / "checkpoints").sound] == steps


def test_saves_by_the_clock_say_that_tidying_up_still_hangs(inputs, tmp_path):
    """The first save is whole, removing what is older does not return: no later save is begun, and that is told."""
    by_the_clock = {"every": "1s", "keep": 1, "pause_seconds": 0.5}
    for result in run(inputs, tmp_path, hang_in_prune=True, deadline="3s", **by_the_clock):
        first, *later = saves(result).values()
        assert first == "saved" and len(later) >= 2 and set(later) == {STILL_HANGS}
        assert result["ended"] == "done" and result["digest"] == inputs["digest"]


def test_a_slow_save_that_gets_on_is_not_given_up_and_one_that_stands_is(inputs, tmp_path):
    stopped = {"every": "never", "stop_at": 3, "deadline": "auto"}
    for result in run(inputs, tmp_path / "slow", slow_pieces_seconds=0.3, standing_seconds=10.0, **stopped):
        (save,) = [event for event in result["events"] if event["kind"] == "save"]
        assert save["saved"] and save["seconds"] > 11.0
    for result in run(inputs, tmp_path / "stands", hang_at=3, hang_rank=1, standing_seconds=3.0, **stopped):
        assert saves(result) == {3: "the storage took nothing of it for 3 s"}


def test_a_stop_on_hanging_storage_says_that_it_could_not_save(inputs, tmp_path):
    for result in run(inputs, tmp_path, hang_at=6, hang_rank=1, stop_at=6, deadline="3s", deadline_from=6):
        assert "stopped on request after step 6, which could not be saved" in result["ended"]
        assert "did not take it within 3 s" in result["ended"] and "after step 4" in result["ended"]


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    alone = SimpleNamespace(rank=0, size=1, nodes=1, hostnames=("one",), broadcast=lambda value: value)
    with pytest.raises(InputError, match="nothing could be saved"):
        find_resume_point(tmp_path / "checkpoints", alone, Events())
