"""Steps as points of curves, and what a tally that keeps only recent steps remembers of the older ones.

A point stands for neighbouring steps. A chart shows a few hundred: a long run is thinned to that. A page that follows a
run for weeks holds its newest steps one by one and the rest in `PastSteps`, whose size does not grow with the run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from coremill.report.records import StepRecord
from coremill.report.spikes import Spike, SpikeFinder

SERIES_POINTS = 400  # more than a chart 1,000 pixels wide can show apart


@dataclass(frozen=True, slots=True)
class Point:
    """Neighbouring steps; sums and counts of what is known of them."""

    step: int  # the last of them, likewise time and learning rate
    time: float
    learning_rate: float
    losses: tuple[float, int]
    gradient_norms: tuple[float, int]
    tokens: float
    seconds: float

    @property
    def loss(self) -> float | None:
        """Their mean."""
        return self.losses[0] / self.losses[1] if self.losses[1] else None

    @property
    def gradient_norm(self) -> float | None:
        """Their mean."""
        return self.gradient_norms[0] / self.gradient_norms[1] if self.gradient_norms[1] else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of their tokens in their time."""
        return self.tokens / self.seconds if self.seconds > 0 else None


def point_of(step: int, record: StepRecord) -> Point:
    """One step."""
    return Point(
        step=step,
        time=record.time,
        learning_rate=record.learning_rate,
        losses=_known(record.loss),
        gradient_norms=_known(record.gradient_norm),
        tokens=record.tokens,
        seconds=record.seconds,
    )


def merged(points: Sequence[Point]) -> Point:
    """Neighbours as one point."""
    last = points[-1]
    return Point(
        step=last.step,
        time=last.time,
        learning_rate=last.learning_rate,
        losses=_summed(point.losses for point in points),
        gradient_norms=_summed(point.gradient_norms for point in points),
        tokens=sum(point.tokens for point in points),
        seconds=sum(point.seconds for point in points),
    )


def thinned(points: Sequence[Point], most: int = SERIES_POINTS) -> Iterator[Point]:
    """At most so many; the first and the last stay as they are."""
    size = max(1, math.ceil((len(points) - 2) / (most - 2)))
    inner = points[1:-1]
    buckets = [points[:1], *(inner[at : at + size] for at in range(0, len(inner), size)), points[1:][-1:]]
    return (merged(bucket) for bucket in buckets if bucket)


@dataclass
class PastSteps:
    """Totals and a thinned curve of steps that are no longer held one by one."""

    last_step: int = 0
    tokens: int = 0
    padding_tokens: float = 0.0
    seconds: float = 0.0
    steady_count: int = 0
    steady_tokens: float = 0.0
    steady_seconds: float = 0.0
    first_loss: float | None = None
    has_first_loss: bool = False
    skipped: list[int] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    finder: SpikeFinder = field(default_factory=SpikeFinder)
    _waiting: list[Point] = field(default_factory=list)  # singles on their way into one point
    _size: int = 1

    def take(self, step: int, record: StepRecord) -> None:
        """One more step; they come in order."""
        self.last_step = step
        self.tokens += int(record.tokens)
        self.padding_tokens += record.padding_tokens
        self.seconds += record.seconds
        if not record.warming_up:
            self.steady_count += 1
            self.steady_tokens += record.tokens
            self.steady_seconds += record.seconds
        if record.skipped:
            self.skipped.append(step)
        elif not self.has_first_loss:
            self.first_loss, self.has_first_loss = record.loss, True
        self.finder.add(step, record.loss)
        self._add(point_of(step, record))

    def curve(self) -> list[Point]:
        """All points, the first step by itself."""
        return [*self.points, *([merged(self._waiting)] if self._waiting else [])]

    def spikes(self, later: Iterable[tuple[int, float | None]]) -> list[Spike]:
        """Of these steps and those that follow."""
        finder = copy.deepcopy(self.finder)
        for step, loss in later:
            finder.add(step, loss)
        return finder.spikes

    def _add(self, point: Point) -> None:
        if not self.points:
            self.points.append(point)
            return
        self._waiting.append(point)
        if len(self._waiting) >= self._size:
            self.points.append(merged(self._waiting))
            self._waiting = []
        if len(self.points) > 2 * SERIES_POINTS:
            inner = self.points[1:]
            self.points = [self.points[0], *(merged(inner[at : at + 2]) for at in range(0, len(inner), 2))]
            self._size *= 2


def _known(value: float | None) -> tuple[float, int]:
    return (value, 1) if value is not None and math.isfinite(value) else (0.0, 0)


def _summed(pairs: Iterable[tuple[float, int]]) -> tuple[float, int]:
    known = [pair for pair in pairs if pair[1]]
    return math.fsum(total for total, _ in known), sum(count for _, count in known)
