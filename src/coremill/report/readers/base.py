"""What follows a run by its events: the protocol of a reader, and all readers of a run as one.

Events are all that a reader needs: a tracker or a metrics endpoint would be one more file here and a line in
`make_readers`. What the launcher says itself and how far ranks are in long work is no event, and goes to whom it helps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coremill.errors import Interrupted, Stopped
from coremill.report.events import Event
from coremill.report.summary import summarise
from coremill.report.tally import RunTally
from coremill.world.heartbeat import Reading

KEPT = 64  # steps, evaluations, lines said: a run has millions, and those who follow it live as long


class Reader:
    """Follows one run. A reader overrides what it has a use for; calls come in this order."""

    name = "a reader of the run"  # as the screen calls it
    is_vital = False  # True: without what it leaves at the end the run has failed

    def begin(self) -> None:
        """Ranks are about to start."""

    def take(self, events: Iterable[Event]) -> None:
        """New events, of every attempt; called a few times per second, also without any."""

    def note(self, text: str) -> None:
        """A finding of the launcher."""

    def take_work(self, readings: Sequence[Reading]) -> None:
        """How far this machine's ranks are in work that takes long, by their heartbeats."""

    def ranks_ended(self) -> None:
        """There will be no more events, but for the sample's; also after a failure."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """All is over: the keys of report.json. Not called on a machine that does not write the report."""

    def close(self, exit_code: int) -> None:
        """Leave no process behind; `exit_code`: of what broke the run off, where `end` was not called."""


class Readers(Reader):
    """All readers of a run, and what its events amount to so far."""

    def __init__(self, run_folder: Path, readers: Sequence[Reader], plan: Mapping[str, Any] | None = None) -> None:
        self.tally = RunTally(plan or {}, keep=KEPT)
        self._folder = run_folder
        self._readers = tuple(readers)

    def __enter__(self) -> Readers:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks_ended()

    def begin(self) -> None:
        for reader in self._readers:
            reader.begin()

    def take(self, events: Iterable[Event]) -> None:
        new = list(events)
        for event in new:
            self.tally.add(event)
        for reader in self._readers:
            reader.take(new)

    def note(self, text: str) -> None:
        for reader in self._readers:
            reader.note(text)

    def take_work(self, readings: Sequence[Reading]) -> None:
        for reader in self._readers:
            reader.take_work(readings)

    def ranks_ended(self) -> None:
        for reader in self._readers:
            reader.ranks_ended()

    def sum_up(self, exit_code: int | None = None) -> dict[str, Any]:
        """End all readers with the summary of the run, which comes back; `exit_code`: of its ranks, where known."""
        summary = summarise(self._folder, exit_code=exit_code)
        for reader in self._readers:
            try:
                reader.end(summary)
            except Exception as error:
                if reader.is_vital:
                    raise
                self.note_failure(reader.name, error)
        return summary

    @contextlib.contextmanager
    def closed_after(self) -> Iterator[None]:
        """No reader outlives the block, whatever breaks it off: a notebook goes on, and may train again."""
        exit_code = 0
        try:
            yield
        except BaseException as error:
            exit_code = getattr(error, "exit_code", 1)
            raise
        finally:
            self.close(exit_code)

    def close(self, exit_code: int) -> None:
        for reader in self._readers:
            # What is on its way is worth more, and so are the readers after this one: a Ctrl-C ends the wait for one.
            with contextlib.suppress(Exception, Stopped, Interrupted):
                reader.close(exit_code)

    def note_failure(self, what: str, error: Exception) -> None:
        """Something beside the run went wrong at its end: said in one line, and it changes nothing."""
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        with contextlib.suppress(Exception):  # the screen itself may be what is gone
            self.note(f"{what} failed, the run is not affected: {words}")
