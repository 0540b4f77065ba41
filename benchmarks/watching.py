"""Watching a contender from outside, the same way for all: bytes on the links, and how long a rank's thread slept.

A rank with one compute thread is at work, waits for a processor, or sleeps. In a training step it sleeps for one
reason, data that has not arrived: sleep is communication that nothing hides. The kernel counts the first two
(`schedstat`), to the nanosecond and whatever the program; the rest of the wall time is the third.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PERIOD_SECONDS = 0.1
SEARCH_SECONDS = 1.0  # how often new processes are looked for


class Series:
    """A growing number at moments of time, read in between by drawing straight lines."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._values: list[float] = []

    def add(self, moment: float, value: float) -> None:
        """One more reading, later than all before."""
        self._times.append(moment)
        self._values.append(value)

    def at(self, moment: float) -> float:
        """The value then; before the first reading the first, after the last the last."""
        index = bisect.bisect_left(self._times, moment)
        if index == 0:
            return self._values[0]
        if index == len(self._times):
            return self._values[-1]
        before, after = self._times[index - 1], self._times[index]
        share = (moment - before) / (after - before)
        return self._values[index - 1] + share * (self._values[index] - self._values[index - 1])

    def between(self, begin: float, end: float) -> float:
        """How much it grew."""
        return self.at(end) - self.at(begin)


class Watcher:
    """Reads counters ten times a second for the time of a block."""

    def __init__(self, counters: Mapping[str, Callable[[], int]], mark: str) -> None:
        self.sent = {name: Series() for name in counters}
        self.awake: dict[int, Series] = {}  # seconds that the first thread of a process ran or waited for a processor
        self._counters = counters
        self._mark = mark.encode()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watcher")

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def asleep_seconds(self, pid: int, begin: float, end: float) -> float:
        """How long the first thread of a process slept in between."""
        return max(0.0, end - begin - self.awake[pid].between(begin, end))

    def _watch(self) -> None:
        searched = 0.0
        while not self._done.wait(PERIOD_SECONDS):
            now = time.time()
            if now - searched >= SEARCH_SECONDS:
                searched = now
                self._search()
            for name, read in self._counters.items():
                self.sent[name].add(time.time(), read())
            for pid, series in self.awake.items():
                with contextlib.suppress(OSError, ValueError):  # it has ended
                    ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
                    series.add(time.time(), (int(ran) + int(waited)) / 1e9)

    def _search(self) -> None:
        """Processes of the contender, on whichever host: they carry its mark in their environment."""
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            if pid not in self.awake:
                with contextlib.suppress(OSError):
                    if self._mark in (folder / "environ").read_bytes():
                        self.awake[pid] = Series()
