"""One more reader is one more file: it sees the run from its start to its summary."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from coremill.errors import StorageError
from coremill.report.events import Event, read_events
from coremill.report.readers.base import Reader, Readers
from coremill.world.stop import signals_lent
from unit.report.fake_run import fake_plan, make_fake_run


class Tracker(Reader):
    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self) -> None:
        self.told.append("begin")

    def take(self, events: Iterable[Event]) -> None:
        self.told += [f"step {event.number('step'):g}" for event in events if event.kind == "step" and event.rank == 0]

    def ranks_ended(self) -> None:
        self.told.append("ranks ended")

    def end(self, summary: Mapping[str, Any]) -> None:
        self.told.append(summary["state"])


def test_a_reader_follows_a_run_to_its_summary(tmp_path: Path) -> None:
    make_fake_run(tmp_path, steps=3, total_steps=3)
    tracker = Tracker()
    readers = Readers(tmp_path, [tracker, Reader()], fake_plan(4, steps=3).to_json())
    with readers:
        readers.note("nothing that it listens to")
        readers.take_work([])
        readers.take(iter(read_events(tmp_path)))
        assert readers.tally.last_step == 3
    summary = readers.sum_up(exit_code=0)
    assert tracker.told == ["begin", "step 1", "step 2", "step 3", "ranks ended", "finished"]
    assert summary["exit_code"] == 0


class Waits(Reader):
    """What it brings away takes long, and somebody presses Ctrl-C."""

    def close(self, exit_code: int) -> None:
        signal.raise_signal(signal.SIGINT)


class Closed(Reader):
    with_code: int | None = None

    def close(self, exit_code: int) -> None:
        self.with_code = exit_code


def test_a_request_while_a_reader_is_closed_leaves_none_open_and_the_error_as_it_was(tmp_path: Path) -> None:
    last = Closed()
    with signals_lent(), pytest.raises(StorageError):
        with Readers(tmp_path, [Waits(), last]).closed_after():
            raise StorageError("the disk is gone")
    assert last.with_code == StorageError.exit_code
