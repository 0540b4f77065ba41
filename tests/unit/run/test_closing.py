"""The end of a run: once its outcome is decided, neither a request to stop nor a reader's failure changes it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coremill.config.load import load_config
from coremill.errors import StorageError
from coremill.report.readers.base import Reader, Readers
from coremill.report.readers.report_json import JsonReader
from coremill.run.closing import leave_report
from coremill.run.folder import RunFolder
from coremill.run.prepare import Orders
from coremill.world.stop import signals_lent
from unit.report.fake_run import make_fake_run


class Impatient(Reader):
    """While this reader ends, somebody presses Ctrl-C."""

    def end(self, summary: Mapping[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)


class Failing(Reader):
    """And says nothing but why."""

    name = "a page"

    def end(self, summary: Mapping[str, Any]) -> None:
        raise RuntimeError("no template\nin many words")


class Screen(Reader):
    name = "the screen"

    def __init__(self) -> None:
        self.said: list[str] = []
        self.has_ended = False

    def note(self, text: str) -> None:
        self.said.append(text)

    def end(self, summary: Mapping[str, Any]) -> None:
        self.has_ended = True


def close(run: Path, *readers: Reader) -> dict[str, Any]:
    """A run without a sample, which ended well."""
    make_fake_run(run, steps=3, total_steps=3)
    config = load_config(None, {"run.export": False}).config
    orders = cast(Orders, None)  # of no use but to the sample
    return leave_report(config, orders, RunFolder(run), Readers(run, readers), 0)


def test_ctrl_c_does_not_change_a_run_that_is_over(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with signals_lent():
        summary = close(tmp_path, JsonReader(tmp_path), Impatient())
    assert (summary["state"], summary["exit_code"]) == ("finished", 0)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reader_that_fails_at_the_end_is_said_and_changes_nothing(tmp_path: Path) -> None:
    screen = Screen()
    (tmp_path / "export").mkdir()  # its card needs orders, and there are none
    summary = close(tmp_path, Failing(), JsonReader(tmp_path), screen)
    assert (summary["state"], summary["exit_code"]) == ("finished", 0)
    assert screen.has_ended and (tmp_path / "report.json").is_file()
    page, card = screen.said
    assert page == "a page failed, the run is not affected: RuntimeError: no template"
    assert card.startswith("the model card failed, the run is not affected: AttributeError: ")


def test_a_run_without_its_report_has_failed(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        close(tmp_path, JsonReader(tmp_path / "absent"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_while_the_sample_is_made_gives_up_the_sample_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """What is trained and exported is a finished run: its report is written, and `train` does not begin again."""

    class Slow:
        def sample(self, *_: object, **__: object) -> dict[str, str]:
            signal.raise_signal(number)
            raise AssertionError("the request was not heard")

    monkeypatch.setattr("coremill.run.closing.make_task", lambda config: Slow())
    make_fake_run(tmp_path, steps=3, total_steps=3)
    config = load_config(None, {"sample.prompt": "Once"}).config
    orders = cast(Orders, SimpleNamespace(model=SimpleNamespace(code_sha256=None), data=None))
    with signals_lent():
        summary = leave_report(config, orders, RunFolder(tmp_path), Readers(tmp_path, [JsonReader(tmp_path)]), 0)
    assert (summary["state"], summary["exit_code"]) == ("finished", 0)
    assert summary["findings"][0].startswith("no sample: ") and "Ctrl-C or SIGTERM" in summary["findings"][0]
    assert RunFolder(tmp_path).is_finished()
