"""A run as it goes, followed by its events alone: each look reads what was appended, and holds little of a long run.

Nothing is asked of the run's processes, so it does not matter where they are, or whether they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coremill.report.events import Event, EventFollower
from coremill.report.summary import read_plan, summary_of
from coremill.report.tally import RunTally

KEPT_STEPS = 2000  # one by one; older ones are a thinned curve and totals
READ_BYTES = 4 * 2**20  # of each rank at a time: the first look at a long run must not hold it all


class LiveRun:
    """Counts a run as `coremill report` does, a piece at a time; of `ranks` alone where not all are wanted."""

    def __init__(self, folder: Path, *, ranks: range | None = None) -> None:
        read_plan(folder)  # a folder without a run is refused at once
        self.folder, self._ranks = folder, ranks
        self.begin()

    def look(self) -> bool:
        """Take in what was said since the last look, and whether there was anything, or a run begun anew."""
        changed = self._read_again_what_is_written_whole()
        while events := self._follower.poll():
            if self._follower.begun_anew:
                break
            for event in events:
                self.take(event)
            changed = True
        if not self._follower.begun_anew:
            return changed
        self.begin()  # --fresh: what was counted so far is another run's
        self.look()
        return True

    def take(self, event: Event) -> None:
        """Count one event in."""
        self.tally.add(event)

    def summary(self) -> dict[str, Any]:
        """The keys of report.json."""
        return summary_of(self.folder, self.tally)

    def begin(self) -> None:
        """From the first event."""
        self._follower = EventFollower(self.folder, most_bytes=READ_BYTES, ranks=self._ranks)
        self.tally = RunTally(keep=KEPT_STEPS, remembers=True)
        self._written: tuple[int, ...] = ()

    def _read_again_what_is_written_whole(self) -> bool:
        """A continuation writes plan and config anew."""
        files = [self.folder / name for name in ("plan.json", "config.yaml", "orders.json")]
        written = tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
        if written == self._written:
            return False
        self.tally.plan, self._written = read_plan(self.folder), written
        return True
