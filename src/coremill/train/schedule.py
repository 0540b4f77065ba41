"""The learning rate over the steps; without torch, so that a launcher can say what a continued run will do."""

from __future__ import annotations

import math

from coremill.config.schema import TrainSection


def learning_rate_at(step: int, steps: int, settings: TrainSection) -> float:
    """The rate used in step `step` (from 1) of `steps`: a linear warm-up, then the chosen decay towards zero."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    # The first step after the warm-up runs at the full rate, the last one still learns: zero would be reached at steps
    # + 1.
    progress = (step - 1 - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    share = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * share
