"""What is left to do when a run has ended: nothing is read or counted a second time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coremill import api
from coremill.config.load import LoadedConfig, load_config
from coremill.report import summary
from coremill.run import command, story
from coremill.run.opening import Options

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "environment_snapshot", lambda: {})


@pytest.mark.parametrize("launcher", ["coremill", "torchrun"])
def test_a_run_file_that_was_changed_meanwhile_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    own = {"COREMILL_LAUNCHER_PID": str(os.getppid())} if launcher == "coremill" else {}
    monkeypatch.setattr(command, "environment_snapshot", lambda: {**RANK, **own})
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"run:\n  folder: {tmp_path / 'run'}\ntrain:\n  steps: 3\n")

    def train(load: Any, *_: object) -> int:
        load()
        run_file.write_text("tra in: [\n")
        return 0

    monkeypatch.setattr(story, "run_as_rank", train)
    ended = command.train_here(lambda: load_config(run_file), Options(), Console(quiet=True))
    assert (ended.exit_code, ended.folder) == (0, tmp_path / "run")
    assert ended.leaves_report == (launcher == "torchrun")  # coremill's own launcher writes it, and not yet


def test_the_summary_is_the_report_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(loaded: LoadedConfig, *_: object) -> int:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "report.json").write_text(json.dumps({"state": "finished", "steps": 3}))
        return 0

    def summarise(*_: object, **__: object) -> None:
        pytest.fail("the events were counted a second time")

    monkeypatch.setattr(story, "run_as_launcher", train)
    monkeypatch.setattr(summary, "summarise", summarise)
    result = api.train(settings={"run.folder": str(tmp_path / "run")}, console=Console(quiet=True))
    assert (result.state, result.summary) == ("finished", {"state": "finished", "steps": 3})
