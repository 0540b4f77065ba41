"""How a training ends for who called it: nothing is read or counted a second time, and Ctrl-C is Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coremill import api
from coremill.config.load import LoadedConfig, load_config
from coremill.errors import Stopped
from coremill.report import summary
from coremill.run import command, story
from coremill.run.opening import Options
from coremill.world.stop import signals_lent

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


def press_ctrl_c(*_: object) -> int:
    signal.raise_signal(signal.SIGINT)
    pytest.fail("the run went on")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever started the tests may have had Ctrl-C ignored."""
    monkeypatch.setattr(story, "run_as_launcher", press_ctrl_c)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_while_a_run_is_prepared_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    with pytest.raises(api.TrainingInterrupted, match="was stopped; the same call goes on") as interrupted:
        api.train(settings={"run.folder": str(tmp_path / "run")}, console=Console(quiet=True))
    result = interrupted.value.result
    assert (result.state, result.exit_code, result.summary) == ("stopped", 75, None)
    assert result.folder == tmp_path / "run"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("heard")
def test_the_command_line_says_it_in_its_own_words(tmp_path: Path) -> None:
    with signals_lent(), pytest.raises(Stopped, match="there was nothing to save"):  # it listens, as the command does
        api.train(settings={"run.folder": str(tmp_path / "run")}, console=Console(quiet=True))
