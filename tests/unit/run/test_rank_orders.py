"""Under a foreign launcher: rank 0 owns the run before anything is written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan
from coremill.report.events import read_events
from coremill.report.readers import make_readers
from coremill.run import closing
from coremill.run import orders as orders_module
from coremill.run.closing import record_failure
from coremill.run.folder import RunFolder
from coremill.run.opening import Options
from coremill.run.orders import with_cpus_told
from coremill.run.prepare import Orders
from coremill.world.folder_lock import LOCK_FILE
from coremill.world.run_lock import OWNED, FolderTaken, OwnedFolders
from coremill.world.stop import ask_to_stop, was_asked_to_stop
from unit.plan.shapes import LLAMA_50M, fleet


@dataclass
class Alone:
    """A world of one rank that torchrun started."""

    rank: int = 0
    nodes: int = 1
    identity: Any = field(default_factory=lambda: SimpleNamespace(launcher="torchrun"))

    def once_per_node(self, action: Any) -> Any:
        return action()

    def broadcast(self, value: Any) -> Any:
        return value


def test_a_run_that_was_taken_over_leaves_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise FolderTaken("taken over")

    monkeypatch.setattr(OWNED, "check_now", lost)
    folder = RunFolder(tmp_path)
    (tmp_path / "events").mkdir()
    loaded = load_config(None, ["sample.prompt=The"])
    with pytest.raises(FolderTaken):
        readers = make_readers(folder.path, None, {}, Console(quiet=True))
        closing.close_rank(loaded.config, None, Alone(), folder, readers)  # type: ignore[arg-type]
    assert not folder.report.exists()


def test_the_words_of_a_rank_that_refused_are_whole(tmp_path: Path) -> None:
    """A line of a disagreement may begin with the package's name; the words begin where the program speaks."""
    words = "b and a differ in coremill\n  coremill: 0.1.0 on a; 0.2.0 on b\n  do: install one"
    log = f"coremill: a word before\ncoremill: {words}\n"
    outcome = SimpleNamespace(exit_code=78, failed_rank=0, message="rank 0 failed", log_tail=log)
    record_failure(outcome, RunFolder(tmp_path), since=0.0)  # type: ignore[arg-type]
    assert [event.get("message") for event in read_events(tmp_path)] == [words]


@pytest.mark.parametrize("fresh", [False, True])
def test_rank_0_does_not_start_beside_a_living_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    monkeypatch.setattr(orders_module, "_cpus_of_node", lambda world: frozenset({0}))
    monkeypatch.setattr(orders_module.atexit, "register", lambda release: None)
    first, folder = OwnedFolders(), RunFolder(tmp_path / "run")
    first.take(folder.path, folder.path / "checkpoints", where_run="", where_checkpoints="", say=print)
    loaded = load_config(None, [f"run.folder={folder.path}"])
    try:
        with pytest.raises(InputError, match="is the folder of a run that is going on: host"):
            orders_module.prepare_together(loaded, folder, Alone(), Options(fresh=fresh))  # type: ignore[arg-type]
        assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", LOCK_FILE]
    finally:
        first.release()
        OWNED.release()


@pytest.mark.parametrize(
    ("engine", "other", "is_told"),
    [("replicate", "aarch64 NEON", True), ("shard", "aarch64 NEON", False), ("replicate", None, False)],
)
def test_cpus_that_may_round_differently_are_in_the_plan(tmp_path: Path, engine, other, is_told) -> None:
    world: Any = SimpleNamespace(nodes=2, rank=0, gather=lambda mine: [mine, other or mine])
    config = RunConfig.model_validate({"parallel": {"engine": engine}})
    plan = make_plan(config, fleet(), read_card(config=LLAMA_50M, name="small"))
    nothing: Any = None
    orders = Orders(task="causal-lm", model=nothing, tokenizer=nothing, data=nothing, steps=1, plan=plan, facts={})
    told = with_cpus_told(orders, RunFolder(tmp_path), world).plan.assumptions[len(plan.assumptions) :]
    if not is_told:
        assert told == () and not list(tmp_path.iterdir())
        return
    assert len(told) == 1 and "aarch64 NEON" in told[0]
    assert json.loads((tmp_path / "plan.json").read_text())["assumptions"][-1] == told[0]


@pytest.mark.parametrize("others_restarts", [0, 1])
def test_a_request_to_stop_outlives_a_start_anew_by_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_restarts: int
) -> None:
    """It was made of the run that goes on; a first start forgets what was left for an earlier one."""

    def refuse(*_: object, **__: object) -> None:
        raise InputError("no such data")

    monkeypatch.setattr(orders_module, "_cpus_of_node", lambda world: frozenset({0}))
    monkeypatch.setattr(orders_module, "_link_of", lambda *_: None)
    monkeypatch.setattr(orders_module.atexit, "register", lambda release: None)
    monkeypatch.setattr(orders_module, "prepare_run", refuse)
    world: Any = Alone(identity=SimpleNamespace(launcher="torchrun", restarts=0))
    world.local_size, world.gather = 1, lambda mine: [mine, others_restarts]
    ask_to_stop(tmp_path)
    try:
        with pytest.raises(InputError, match="no such data"):
            orders_module.prepare_together(
                load_config(None, [f"run.folder={tmp_path}"]), RunFolder(tmp_path), world, Options()
            )
    finally:
        OWNED.release()
    assert was_asked_to_stop(tmp_path) == bool(others_restarts)


def test_what_torchrun_starts_anew_goes_on_from_the_newest() -> None:
    console = Console(record=True, width=400)

    def world(*restarts: int) -> Any:
        return SimpleNamespace(identity=SimpleNamespace(restarts=restarts[0]), gather=lambda mine: list(restarts))

    named, newest = Options(start_from="best"), Options()
    assert orders_module._as_restarted(named, world(0, 0), console) is named
    assert orders_module._as_restarted(newest, world(0, 1), console) is newest
    again = orders_module._as_restarted(named, world(0, 1), console)  # the agent of another host counted it
    assert (again.start_from, again.restarted) == (None, True)
    assert "--from best was for its first start" in console.export_text()
