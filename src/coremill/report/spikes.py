"""Loss spikes: steps whose loss stands far above what the steps before it had.

The rule: the last 48 finite losses have a median and a median absolute deviation (MAD). A step is a spike where its
loss lies above the median by more than 8 standard deviations as the MAD tells them (1.4826 x MAD), and by more than a
tenth of the median, so that a run whose loss hardly moves is not flagged for noise. The first 16 steps are only
learned from. Both are robust: neither the fall at the start nor an earlier spike moves them much. Over 100 made-up runs
of 1,000 steps with normal noise the rule flags none (tests/unit/report/test_report_spikes.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

WINDOW_STEPS = 48
LEARNED_STEPS = 16
DEVIATIONS = 8.0
LEAST_SHARE = 0.1
SIGMA_OF_MAD = 1.4826  # for a normal distribution


@dataclass(frozen=True)
class Spike:
    """Neighbouring steps with a loss far above the usual; the highest stands for them."""

    first_step: int
    last_step: int
    loss: float  # the highest
    usual: float  # the median before it

    def __str__(self) -> str:
        steps = f"step {self.first_step}" + (f" to {self.last_step}" if self.last_step > self.first_step else "")
        return f"loss spike at {steps}: {self.loss:.4g}, where {self.usual:.4g} was usual"


@dataclass
class SpikeFinder:
    """Takes a run step by step; of it only the last losses are held, and the spikes."""

    spikes: list[Spike] = field(default_factory=list)
    _recent: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)  # the same, by size

    def add(self, step: int, loss: float | None) -> None:
        """The next step; one without a finite loss is passed over."""
        if loss is None or not math.isfinite(loss):
            return
        recent, ordered, spikes = self._recent, self._ordered, self.spikes
        if len(recent) >= LEARNED_STEPS:
            middle = median(ordered)
            # Most steps lie below the median plus a tenth: the deviation is worked out for the others only.
            if loss - middle > LEAST_SHARE * abs(middle) and loss - middle > DEVIATIONS * SIGMA_OF_MAD * median(
                abs(value - middle) for value in ordered
            ):
                if spikes and spikes[-1].last_step == step - 1:
                    last = spikes.pop()
                    spikes.append(Spike(last.first_step, step, max(last.loss, loss), last.usual))
                else:
                    spikes.append(Spike(step, step, loss, middle))
        if len(recent) == WINDOW_STEPS:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(loss)
        insort(ordered, loss)


def loss_spikes(losses: Iterable[tuple[int, float | None]]) -> list[Spike]:
    """All spikes of a run; steps in order, those without a finite loss are passed over."""
    finder = SpikeFinder()
    for step, loss in losses:
        finder.add(step, loss)
    return finder.spikes
