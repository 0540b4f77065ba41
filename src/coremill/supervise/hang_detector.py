"""Watches the ranks of one attempt for its launcher: heartbeats in, the rank that is stuck out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from coremill.supervise.stuck import Limits, Stuck, Watch
from coremill.world.heartbeat import HeartbeatBoard, Reading

SLOW_SAVE_SECONDS = 10.0  # without a byte, or in all where the plan knows of no longer save
SLOWER_THAN_PLANNED = 2.0
STARVATION_EVERY_SECONDS = 1.0


class HangDetector:
    """One attempt's eyes. `on_slow_save` hears once per save, by local rank and seconds, that storage is slow: slower
    than planned, or that it takes nothing."""

    def __init__(
        self,
        board: HeartbeatBoard,
        limits: Limits,
        on_slow_save: Callable[[int, float], None] = lambda rank, seconds: None,
        planned_save_seconds: float = 0.0,
    ) -> None:
        board.clear()
        self.board = board
        self._watch = Watch(board.ranks, limits)
        self._on_slow_save = on_slow_save
        self._told: dict[int, float] = {}  # by local rank, the save it is about
        self._grew: dict[int, tuple[int, float]] = {}  # by local rank, what of it was written when it last grew
        self._long_save_seconds = max(SLOW_SAVE_SECONDS, SLOWER_THAN_PLANNED * planned_save_seconds)
        self._starvation = Starvation()
        self._starvation_at = 0.0
        self.first_step_done_at: float | None = None  # time.monotonic() when it was seen to be done
        self.readings: list[Reading] = [board.read(index) for index in range(board.ranks)]

    def look(self, pids: Sequence[int | None]) -> Stuck | None:
        """Once a poll, with the processes that still run, by local rank."""
        now = time.monotonic()
        self.readings = [self.board.read(index) for index in range(self.board.ranks)]
        self._tell_slow_saves(pids, now)
        if self.first_step_done_at is None and any(reading.steps_done for reading in self.readings):
            self.first_step_done_at = now
        self._excuse_the_starved(pids, now)
        return self._watch.look(
            self.readings,
            [pid is not None for pid in pids],
            now,
            lambda index: is_stopped(pids[index] or 0),
        )

    def _excuse_the_starved(self, pids: Sequence[int | None], now: float) -> None:
        if now - self._starvation_at < STARVATION_EVERY_SECONDS:
            return
        self._starvation_at = now
        suspects = {pid: index for index in self._watch.suspects() if (pid := pids[index]) is not None}
        for pid, seconds in self._starvation.seconds_since(suspects).items():
            self._watch.excuse(suspects[pid], seconds)

    def _tell_slow_saves(self, pids: Sequence[int | None], now: float) -> None:
        for index, reading in enumerate(self.readings):
            since = reading.saving_since
            if since is None or self._told.get(index) == since or pids[index] is None:
                continue
            if self._grew.get(index, (-1, 0.0))[0] != reading.saved_bytes:
                self._grew[index] = (reading.saved_bytes, now)
            stands = now - max(since, self._grew[index][1]) >= SLOW_SAVE_SECONDS
            if not stands and now - since < self._long_save_seconds:
                continue
            self._told[index] = since
            self._on_slow_save(index, now - since)

    @property
    def saved_bytes(self) -> int:
        """Of the saves under way, written so far by all local ranks."""
        return sum(reading.saved_bytes for reading in self.readings)

    @property
    def slower_step_seconds(self) -> float:
        return self._watch.slower_step_seconds

    @property
    def steps_done(self) -> int:
        """The last step that any local rank has done in this attempt; 0: none."""
        return max((reading.steps_done for reading in self.readings), default=0)

    @property
    def origin_step(self) -> int | None:
        """The step this attempt went on from; None while that is not known."""
        firsts = [reading.first_step for reading in self.readings if reading.first_step]
        return min(firsts) - 1 if firsts else None

    @property
    def has_met(self) -> bool:
        """Whether the ranks found each other."""
        return any(reading.phase not in ("start", "meet") for reading in self.readings)


def is_stopped(pid: int) -> bool:
    """Whether the kernel has the process stopped by a signal; a debugger's stop is not one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False


class Starvation:
    """How long processes stood in the queue for a CPU: a rank that is not let on is not one that hangs.

    The kernel counts per thread (`/proc/PID/task/TID/schedstat`, second number, nanoseconds): time ready to run but not
    running, because others ran or because a cgroup's quota was spent. Where it does not tell, nobody is ever starved.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._waited: dict[int, dict[str, int]] = {}

    def seconds_since(self, pids: Iterable[int]) -> dict[int, float]:
        """Since it was last asked, of the thread that waited longest; 0 for a new process. Others are forgotten."""
        former, self._waited = self._waited, {pid: self._read(pid) for pid in pids}
        starved = {}
        for pid, threads in self._waited.items():
            before = former.get(pid, {})
            waits = [nanoseconds - before[thread] for thread, nanoseconds in threads.items() if thread in before]
            starved[pid] = max(waits, default=0) / 1e9
        return starved

    def _read(self, pid: int) -> dict[str, int]:
        threads = {}
        with contextlib.suppress(OSError):  # it ended meanwhile
            for task in (self._proc / str(pid) / "task").iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    threads[task.name] = int((task / "schedstat").read_text().split()[1])
        return threads
