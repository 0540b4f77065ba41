"""Which checkpoint stays beside the newest, which are set aside, and one that is read while it goes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_checkpoints import make_store, save, save_spread

from coremill.checkpoint.agreement import join_views, view_of
from coremill.checkpoint.held import held, verify_held
from coremill.checkpoint.manifest import Checkpoint, Unusable, step_folders, survey
from coremill.checkpoint.store import GO_ON_FROM
from coremill.config.schema import EvaluationSection, RunConfig
from coremill.errors import InputError
from coremill.run.start_from import find_checkpoint, set_later_aside

CONFIG = RunConfig().model_copy(update={"evaluation": EvaluationSection(every_steps=10, keep_best="loss")})


def names(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in step_folders(folder)]


def evaluated(**losses: float) -> dict[str, object]:
    scores = [{"step": int(step[1:]), "metrics": {"loss": loss}} for step, loss in losses.items()]
    return {"evaluations": {"scores": scores, "is_due": False}}


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (10, 20, 30, 40):
        save(store, step, keep=9)
    found = join_views({0: view_of(survey(store.folder))}, ["host"])
    assert found.steps() == [40, 30, 20, 10]
    assert found.kept(2, frozenset(), beside=10) == ["step-00000040", "step-00000030", "step-00000010"]
    assert found.kept(2, frozenset(), beside=30) == ["step-00000040", "step-00000030"]
    assert found.kept(2, frozenset({"step-00000010"}), beside=10) == ["step-00000040", "step-00000030"]
    assert found.kept(5, frozenset(), beside=10) is None
    kept = found.kept(2, frozenset(), beside=10)
    assert kept is not None
    store.prune_to(kept)
    assert names(store.folder) == [40, 30, 10]


def test_later_ones_are_set_aside_and_nothing_is_deleted(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (10, 20, 30):
        save(store, step, keep=9)
    assert store.steps_after(10) == [20, 30]
    store.set_aside(10, "set-aside-now")
    store.set_aside(10, "set-aside-now")  # once more, by a rank: nothing is left to move
    assert store.steps_after(10) == []
    assert names(store.folder) == [10]
    assert names(store.folder / "set-aside-now") == [30, 20]
    for checkpoint in survey(store.folder / "set-aside-now").sound:
        checkpoint.verify()
    store.sweep()
    store.clear()  # --fresh forgets the run, not what was set aside
    assert names(store.folder / "set-aside-now") == [30, 20]


def test_a_step_is_found_by_number_or_as_the_best_of_those_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 10, keep=9)
    save(store, 20, keep=9)
    save(store, 40, keep=9, **evaluated(s10=3.0, s20=2.0, s30=1.0, s40=2.5))  # the best of all, 30, is gone
    assert find_checkpoint(CONFIG, tmp_path, "10", "--from").step == 10
    assert find_checkpoint(CONFIG, tmp_path, "best", "--from").step == 20
    with pytest.raises(InputError, match="step 30 was not kept") as refused:
        find_checkpoint(CONFIG, tmp_path, "30", "--from")
    assert refused.value.do == "kept are: 10, 20, 40"
    with pytest.raises(InputError, match="--from newest is no step"):
        find_checkpoint(CONFIG, tmp_path, "newest", "--from")
    (store.folder / "step-00000010" / "state.json").unlink()
    with pytest.raises(InputError, match="step 10 cannot be used"):
        find_checkpoint(CONFIG, tmp_path, "10", "--from")


def damage(checkpoint: Checkpoint) -> None:
    file = checkpoint.folder / checkpoint.manifest.files[0].name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_nothing_is_set_aside_for_a_step_that_cannot_be_used(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    damage(save(store, 10, keep=9))
    save(store, 20, keep=9)
    said: list[str] = []
    with pytest.raises(InputError, match="step 10 cannot be used") as refused:
        set_later_aside(CONFIG, tmp_path, find_checkpoint(CONFIG, tmp_path, "10", "--from"), said.append)
    assert "was altered" in (refused.value.why or "")
    assert names(store.folder) == [20, 10] and not (store.folder / GO_ON_FROM).exists()
    save(store, 30, keep=9)
    set_later_aside(CONFIG, tmp_path, find_checkpoint(CONFIG, tmp_path, "20", "--from"), said.append)
    assert names(store.folder) == [20, 10] and (store.folder / GO_ON_FROM).exists()
    assert said[0].startswith("set aside: step 30, now in ")


@pytest.mark.parametrize(("best", "is_moved"), [(30, True), (10, False)])
def test_answers_of_a_best_step_go_aside_with_it(tmp_path: Path, best: int, is_moved: bool) -> None:
    store = make_store(tmp_path)
    for step in (10, 20, 30):
        losses = {f"s{each}": 1.0 if each == best else 2.0 for each in range(10, step + 1, 10)}
        save(store, step, keep=9, **evaluated(**losses))
    (tmp_path / "predictions.json").write_text(f"of step {best}")
    set_later_aside(CONFIG, tmp_path, find_checkpoint(CONFIG, tmp_path, "10", "--from"), lambda text: None)
    moved = list(store.folder.glob("set-aside-*/predictions.json"))
    assert [file.read_text() for file in moved] == ([f"of step {best}"] if is_moved else [])
    assert (tmp_path / "predictions.json").exists() is not is_moved


def test_killed_while_it_sets_aside_the_newest_are_gone_and_the_report_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    for step in (10, 20, 30):
        save(store, step, keep=9)
    rename, moved = Path.rename, []

    def killed_at_the_second(self: Path, target: Path) -> Path:
        if self.name.startswith("step-"):
            if moved:
                raise KeyboardInterrupt
            moved.append(self.name)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        set_later_aside(CONFIG, tmp_path, find_checkpoint(CONFIG, tmp_path, "10", "--from"), lambda text: None)
    assert names(store.folder) == [20, 10]
    (told,) = map(json.loads, (tmp_path / "events" / "rank-00000.jsonl").read_text().splitlines())
    assert (told["kind"], told["after_step"], told["steps"]) == ("set_aside", 10, [20, 30])


def test_of_a_spread_step_ranks_set_later_ones_aside(tmp_path: Path) -> None:
    first, _ = save_spread(tmp_path, 10)
    save(first, 20, keep=9)
    run = first.folder.parent
    set_later_aside(CONFIG, run, find_checkpoint(CONFIG, run, "10", "--from"), lambda text: None)
    assert names(first.folder) == [20, 10] and (first.folder / GO_ON_FROM).exists()


def test_without_an_evaluation_there_is_no_best(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint that is kept was evaluated"):
        find_checkpoint(CONFIG, tmp_path, "best", "--step")
    save(make_store(tmp_path), 10)
    with pytest.raises(InputError, match="no checkpoint that is kept was evaluated"):
        find_checkpoint(CONFIG, tmp_path, "best", "--step")


def test_what_is_held_can_be_read_after_it_was_let_go(tmp_path: Path) -> None:
    checkpoint = save(make_store(tmp_path), 10)
    with held(checkpoint) as files:
        shutil.rmtree(checkpoint.folder)
        counted: list[int] = []
        verify_held(files, counted.append)
        assert sum(counted) == checkpoint.manifest.total_bytes
        assert files.state()["step"] == 10
    with pytest.raises(Unusable, match="cannot be opened"), held(checkpoint):
        pass


def test_what_is_held_and_altered_is_found(tmp_path: Path) -> None:
    checkpoint = save(make_store(tmp_path), 10)
    file = checkpoint.folder / checkpoint.manifest.files[0].name
    damage(checkpoint)
    with held(checkpoint) as files, pytest.raises(Unusable, match="was altered"):
        verify_held(files, lambda count: None)
    file.unlink()
    file.symlink_to(tmp_path)
    with pytest.raises(Unusable), held(checkpoint):
        pass


def test_a_part_of_a_step_is_not_exported(tmp_path: Path) -> None:
    from coremill.run.export_command import _candidates
    from coremill.run.folder import RunFolder

    first, second = save_spread(tmp_path, 10)
    run = RunFolder(first.folder.parent)
    for step in (None, "10"):
        with pytest.raises(InputError, match="only a part of step 10 is here"):
            _candidates(CONFIG, run, step)
    for file in (second.folder / "step-00000010").glob("rank-*"):
        shutil.copy(file, first.folder / "step-00000010")
    assert [each.step for each in _candidates(CONFIG, run, None)] == [10]
