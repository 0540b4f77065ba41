"""A first node that is lost between the last step and the report: its successor writes that, and waits for none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coremill.config.load import load_config
from coremill.config.show import show
from coremill.report.events import EventWriter
from coremill.run import late_report
from coremill.run.folder import RunFolder
from coremill.run.late_report import leave_late_report
from coremill.run.opening import Options
from coremill.world.identity import NodeIdentity

FIRST = NodeIdentity(nodes=2, node_rank=0, ranks_per_node=1, master_address="pod-0", master_port=29500)
SECOND = NodeIdentity(nodes=2, node_rank=1, ranks_per_node=1, master_address="pod-0", master_port=29500)


class _Orders:
    """Stands in for what a run left for its ranks: this part of the story only hands it on."""

    steps = 3
    plan = type("Plan", (), {"to_json": staticmethod(dict)})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "run.yaml").write_text("train: {steps: 3}\n")
    loaded = load_config(tmp_path / "run.yaml", [f"run.folder={tmp_path / 'run'}"])
    folder = RunFolder(tmp_path / "run")
    folder.export.mkdir(parents=True)
    folder.config.write_text(show(loaded))
    folder.plan.write_text("{}")
    for rank in (0, 1):
        with EventWriter(folder.path, rank) as events:
            events.write("start", world_size=2)
            events.write("end", seconds=1.0)
    left: list[int] = []

    def leave(config: Any, orders: Any, where: RunFolder, readers: Any, exit_code: int) -> dict[str, Any]:
        left.append(exit_code)
        where.report.write_text(json.dumps({"state": "finished"}))
        return {"exit_code": 0}

    monkeypatch.setattr(late_report, "leave_report", leave)
    monkeypatch.setattr(late_report, "render_summary", lambda *_: None)
    monkeypatch.setattr(late_report.Orders, "read", staticmethod(lambda path: _Orders()))
    return {"config": loaded.config, "folder": folder, "left": left, "path": tmp_path / "run.yaml"}


def late(run: dict[str, Any], node: NodeIdentity | None = FIRST, **options: Any) -> int | None:
    return leave_late_report(run["config"], run["folder"], Options(**options), Console(quiet=True), node)


def test_the_report_is_all_that_is_left(run: dict[str, Any]) -> None:
    assert late(run) == 0 and run["left"] == [0] and run["folder"].is_finished()
    assert late(run) is None and run["left"] == [0]  # once


@pytest.mark.parametrize("node", [None, SECOND], ids=["single", "second"])
def test_only_the_first_of_several_nodes(run: dict[str, Any], node: NodeIdentity | None) -> None:
    assert late(run, node) is None and not run["left"]


@pytest.mark.parametrize("options", [{"fresh": True}, {"dry_run": True}, {"start_from": "2"}], ids=str)
def test_who_asks_for_something_else_gets_it(run: dict[str, Any], options: dict[str, Any]) -> None:
    assert late(run, **options) is None and not run["left"]


@pytest.mark.parametrize("missing", ["end", "export", "error", "begun again", "more steps", "config"])
def test_where_more_is_missing_the_run_goes_on(run: dict[str, Any], missing: str) -> None:
    folder: RunFolder = run["folder"]
    if missing == "end":  # the first rank was killed while it exported
        (folder.path / "events" / "rank-00000.jsonl").unlink()
    elif missing == "export":
        folder.export.rmdir()
    elif missing == "more steps":
        run["config"] = load_config(run["path"], [f"run.folder={folder.path}", "train.steps=9"]).config
    elif missing == "config":
        folder.config.unlink()
    else:
        with EventWriter(folder.path, 0) as events:
            if missing == "error":
                events.write("error", message="no", exit_code=1)
            else:
                events.write("start", world_size=2)
    assert late(run) is None and not run["left"]
