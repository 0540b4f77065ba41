"""Who is stuck: a rank that stands still, or one that all others wait for. Pure of clocks and processes.

    what is seen                                              limit                               phases
    no beat, and the kernel says stopped                      max(10 s, 5 x median step)          all
    no beat                                                   the same; 2 min outside steps       all
    beats, no mark, does not wait for others                  the same; 2 min in the first steps  step
    the same                                                  10 min                              all others
    everybody waits for others                                2 x (other hosts), 3 x (one)        step
    a save is neither done nor given up                       1.5 x supervise.save_deadline       all

Work that takes long leaves a mark with every few megabytes it reads, hashes, sends or writes: however large a model is,
a rank that gets on is never stuck. Of a save without a deadline of the user's, time counts while no byte is written.

Time counts only while the launcher itself runs: a machine that was suspended, or a launcher stopped with Ctrl-Z, finds
its ranks as it left them. Time a rank spent in the queue for a CPU does not count either.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coremill.world.heartbeat import Reading

SHORTEST_SECONDS = 10.0
MEDIAN_STEPS = 5.0  # so many median steps
ENOUGH_STEPS = 3  # durations of the first ones, which allocate, say little
SILENT_OUTSIDE_STEPS_SECONDS = 120.0  # importing from a slow disk holds the interpreter's lock
UNTIMED_STEP_SECONDS = 120.0
UNTIMED_STEPS = 10.0  # so many planned steps, where that is longer
UNTIMED_PHASE_SECONDS = 600.0
# TCP backs off: an outage of 8 s stalls gloo for up to 13.8 s, and on a busy machine the next steps take a while.
OTHER_HOSTS_FACTOR = 2.0
DEADLOCK_FACTOR = 3.0
LONGEST_TICK_SECONDS = 1.0
RECENT_STEPS = 101
SUSPECT_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the config says."""

    stuck_after_seconds: float | None = None  # None: by the median step
    is_watching: bool = True
    save_deadline_seconds: float = 600.0
    save_may_get_on: bool = False  # the deadline counts from the last byte written, not from the beginning
    other_hosts: bool = False
    planned_step_seconds: float = 0.0


@dataclass(frozen=True)
class Stuck:
    """The rank to end, and why."""

    local_rank: int
    text: str  # reads on after "rank 1 "
    silent_seconds: float
    by_storage: bool = False
    by_peers: bool = False  # those of other hosts: nothing that ranks do together comes to an end here


@dataclass
class _Seen:
    """What is remembered of one rank."""

    beats: int = -1
    marks: int = -1
    beat_at: float = 0.0
    mark_at: float = 0.0
    saving: tuple[float | None, int] = (None, 0)  # since when, bytes where those count
    saving_at: float = 0.0


@dataclass
class Watch:
    """Looks at readings again and again, and says who is stuck. One per attempt."""

    ranks: int
    limits: Limits
    _seen: list[_Seen] = field(init=False)
    _clock: float = 0.0
    _last_now: float | None = None
    _steps_done: int = 0
    _step_at: float | None = None
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def __post_init__(self) -> None:
        self._seen = [_Seen() for _ in range(self.ranks)]

    @property
    def limit_seconds(self) -> float:
        """How long a rank may stand still within steps."""
        if self.limits.stuck_after_seconds is not None:
            return self.limits.stuck_after_seconds
        median = statistics.median(self._durations) if len(self._durations) >= ENOUGH_STEPS else 0.0
        return max(SHORTEST_SECONDS, MEDIAN_STEPS * median)

    @property
    def slower_step_seconds(self) -> float:
        """By how much a step takes longer than planned, by the median of those that were seen."""
        median = statistics.median(self._durations) if self._durations else 0.0
        return max(0.0, median - self.limits.planned_step_seconds)

    def suspects(self) -> list[int]:
        """Ranks that have stood still for a moment: worth asking whether they are let on at all."""
        return [
            index
            for index, seen in enumerate(self._seen)
            if self._clock - min(seen.beat_at, seen.mark_at) >= SUSPECT_SECONDS
        ]

    def excuse(self, local_rank: int, seconds: float) -> None:
        """So long the rank was ready but had no CPU."""
        seen = self._seen[local_rank]
        for name in ("beat_at", "mark_at", "saving_at"):
            setattr(seen, name, min(self._clock, getattr(seen, name) + seconds))

    def look(
        self, readings: Sequence[Reading], running: Sequence[bool], now: float, is_stopped: Callable[[int], bool]
    ) -> Stuck | None:
        """Take in what ranks say at `now`; `is_stopped` asks the kernel about a local rank, only where it matters."""
        self._clock += min(LONGEST_TICK_SECONDS, 0.0 if self._last_now is None else now - self._last_now)
        self._last_now = now
        self._time_steps(readings)
        for seen, reading in zip(self._seen, readings, strict=True):
            if seen.beats != reading.beats:
                seen.beats, seen.beat_at = reading.beats, self._clock
            if seen.marks != reading.marks:
                seen.marks, seen.mark_at = reading.marks, self._clock
            saving = (reading.saving_since, reading.saved_bytes if self.limits.save_may_get_on else 0)
            if seen.saving != saving:
                seen.saving, seen.saving_at = saving, self._clock
        if not self.limits.is_watching:
            return None
        alive = [index for index in range(self.ranks) if running[index]]
        return (
            self._silent(alive, readings, is_stopped)
            or self._standing(alive, readings)
            or self._all_waiting(alive, readings)
            or self._saving_too_long(alive, readings)
        )

    def _time_steps(self, readings: Sequence[Reading]) -> None:
        done = max((reading.steps_done for reading in readings), default=0)
        if done > self._steps_done:
            if self._step_at is not None:
                self._durations.append((self._clock - self._step_at) / (done - self._steps_done))
            self._steps_done, self._step_at = done, self._clock

    def _silent(
        self, alive: Sequence[int], readings: Sequence[Reading], is_stopped: Callable[[int], bool]
    ) -> Stuck | None:
        for index in alive:
            silent = self._clock - self._seen[index].beat_at
            if silent < self.limit_seconds:
                continue
            if is_stopped(index):
                return Stuck(index, f"is stopped (no sign of life for {silent:.0f} s{_in(readings[index])})", silent)
            bound = self.limit_seconds
            if readings[index].phase != "step":
                bound = max(bound, SILENT_OUTSIDE_STEPS_SECONDS)
            if silent >= bound:
                return Stuck(index, f"gave no sign of life for {silent:.0f} s{_in(readings[index])}", silent)
        return None

    def _standing(self, alive: Sequence[int], readings: Sequence[Reading]) -> Stuck | None:
        """The one that has stood longest of those that wait for nobody."""
        busy = [index for index in alive if not readings[index].is_waiting]
        for index in sorted(busy, key=lambda index: self._seen[index].mark_at):
            reading, stood = readings[index], self._clock - self._seen[index].mark_at
            if stood < self._standing_limit(reading):
                continue
            waiting = any(readings[other].is_waiting for other in alive)
            waited_for = ", and the others wait for it" if waiting else ""
            return Stuck(index, f"has not got on for {stood:.0f} s{_in(reading)}{waited_for}", stood)
        return None

    def _standing_limit(self, reading: Reading) -> float:
        if reading.phase == "save":  # by then the ranks have given it up themselves
            return max(UNTIMED_PHASE_SECONDS, self.limit_seconds, self.limits.save_deadline_seconds)
        if reading.phase != "step":
            return max(UNTIMED_PHASE_SECONDS, self.limit_seconds)
        if len(self._durations) < ENOUGH_STEPS and self.limits.stuck_after_seconds is None:
            return max(UNTIMED_STEP_SECONDS, UNTIMED_STEPS * self.limits.planned_step_seconds)
        return self.limit_seconds

    def _all_waiting(self, alive: Sequence[int], readings: Sequence[Reading]) -> Stuck | None:
        if not alive or any(not readings[index].is_waiting or readings[index].phase != "step" for index in alive):
            return None
        waited = self._clock - max(self._seen[index].mark_at for index in alive)
        first = alive[0]
        if self.limits.other_hosts:
            if waited >= OTHER_HOSTS_FACTOR * self._standing_limit(readings[first]):
                text = f"heard nothing from the ranks on other hosts for {waited:.0f} s{_in(readings[first])}"
                return Stuck(first, text, waited, by_peers=True)
        elif waited >= DEADLOCK_FACTOR * self._standing_limit(readings[first]):
            text = f"waits for the others as they do for it, for {waited:.0f} s{_in(readings[first])}"
            return Stuck(first, text, waited)
        return None

    def _saving_too_long(self, alive: Sequence[int], readings: Sequence[Reading]) -> Stuck | None:
        for index in alive:
            took = self._clock - self._seen[index].saving_at
            if readings[index].saving_since is not None and took >= self.limits.save_deadline_seconds:
                without = " without a byte getting on" if self.limits.save_may_get_on else ""
                return Stuck(index, f"has been writing a checkpoint for {took:.0f} s{without}", took, by_storage=True)
        return None


def _in(reading: Reading) -> str:
    return f" in step {reading.step}" if reading.phase == "step" else f" in phase {reading.phase}"
