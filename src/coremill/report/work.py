"""Work that takes long, as ranks count it in bytes: a bar on a terminal, a line now and then elsewhere.

Reading weights, checking a checkpoint, fetching it from other hosts, exporting; and saves, which run beside the rest.
Ranks do the same work at about the same time: what is shown is all ranks that this machine sees together, in the work
of the one that is furthest behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coremill.report.terminal import format_bytes, format_percent, format_seconds
from coremill.world.heartbeat import WORKS, Reading

WORTH_SAYING_SECONDS = 3.0  # what is done sooner is not shown
LINE_EVERY_SECONDS = 15.0  # off a terminal


class LongWork:
    """One kind of work, from its first byte to its last."""

    def __init__(self, what: str, now: float) -> None:
        self.what = what
        self.done_bytes = self.total_bytes = 0
        self._began, self._said_at = now, now
        self._first_bytes: int | None = None

    def take(self, done_bytes: int, total_bytes: int) -> None:
        """How far it is."""
        if self._first_bytes is None:
            self._first_bytes = done_bytes
        self.done_bytes, self.total_bytes = min(done_bytes, total_bytes or done_bytes), total_bytes

    def is_worth_saying(self, now: float) -> bool:
        """Whether it takes long."""
        return now - self._began >= WORTH_SAYING_SECONDS

    def is_due(self, now: float) -> bool:
        """Whether another line about it is; says yes once."""
        if not self.is_worth_saying(now) or now - self._said_at < LINE_EVERY_SECONDS:
            return False
        self._said_at = now
        return True

    def words(self, now: float) -> str:
        """12.1 GB of 96.4 GB (13 %), 125 MB/s, ETA 11m 14s."""
        share = f" ({format_percent(self.done_bytes / self.total_bytes)})" if self.total_bytes else ""
        total = f" of {format_bytes(self.total_bytes)}{share}" if self.total_bytes else ""
        rate = (self.done_bytes - (self._first_bytes or 0)) / max(now - self._began, 1e-9)
        left = self.total_bytes - self.done_bytes
        pace = f", {format_bytes(rate)}/s" if rate > 0 else ""
        eta = f", ETA {format_seconds(left / rate)}" if rate > 0 and left > 0 else ""
        return f"{format_bytes(self.done_bytes)}{total}{pace}{eta}"

    def row(self, now: float) -> Table:
        """For the live display."""
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=self.total_bytes or None, completed=self.done_bytes, pulse=not self.total_bytes)
        grid.add_row(Text(self.what, style="bold"), bar, Text(self.words(now), style="cyan"))
        return grid


class LongWorks:
    """What ranks are busy with now: at most one work, and a save."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[str, LongWork] = {}

    def take(self, readings: Sequence[Reading]) -> None:
        """What ranks said last."""
        found: dict[str, tuple[int, int]] = {}
        busy = [reading for reading in readings if reading.work]
        if busy:
            what = min((reading.work for reading in busy), key=WORKS.index)
            same = [reading for reading in busy if reading.work == what]
            found[what] = (sum(each.work_done_bytes for each in same), sum(each.work_total_bytes for each in same))
        saving = [reading for reading in readings if reading.saving_since is not None and reading.save_total_bytes]
        if saving:
            done, total = sum(each.saved_bytes for each in saving), sum(each.save_total_bytes for each in saving)
            found["saving"] = (done, total)
        now = self._clock()
        self._under_way = {what: self._under_way.get(what) or LongWork(what, now) for what in found}
        for what, (done, total) in found.items():
            self._under_way[what].take(done, total)

    def lines(self) -> list[str]:
        """What is due to be said off a terminal."""
        now = self._clock()
        return [f"{work.what}: {work.words(now)}" for work in self._under_way.values() if work.is_due(now)]

    def rows(self) -> list[RenderableType]:
        """What the live display shows."""
        now = self._clock()
        return [work.row(now) for work in self._under_way.values() if work.is_worth_saying(now)]
