"""The learning rate over the steps; without torch, so that a launcher can say what a run will do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from coremill.config.schema import TrainSection
from coremill.plan.words import plural

# Of warm-up-stable-decay, where the run file names no share: a fifth is about as good as a cosine over the whole run.
DECAY_SHARE = 0.2


@dataclass(frozen=True)
class Phases:
    """A run of `steps` steps: the rate rises, stays at its peak, and falls from the step after `decay_after` on."""

    steps: int
    warmup_steps: int
    decay_after: int  # the last step at the peak; `steps` where the rate never falls


def phases_of(steps: int, settings: TrainSection) -> Phases:
    """Shares as steps: rounded, at least one, and a warm-up leaves a step for the peak."""
    warmup = settings.warmup_steps
    if settings.warmup_share:
        warmup = min(steps - 1, _share_of(settings.warmup_share, steps))
    if settings.schedule == "constant":
        return Phases(steps, warmup, steps)
    if settings.schedule == "warmup-stable-decay":
        return Phases(steps, warmup, max(warmup, steps - _share_of(settings.decay_share or DECAY_SHARE, steps)))
    return Phases(steps, warmup, warmup)


def learning_rate_at(step: int, steps: int, settings: TrainSection) -> float:
    """The rate used in step `step` (from 1) of `steps`: a linear warm-up, then the chosen decay towards the minimum."""
    phases = phases_of(steps, settings)
    if step <= phases.warmup_steps:
        return settings.learning_rate * step / phases.warmup_steps
    if step <= phases.decay_after:
        return settings.learning_rate
    # The first step of the decay still runs at the full rate, the last one still learns: the minimum would be reached
    # at steps + 1.
    progress = (step - 1 - phases.decay_after) / max(1, steps - phases.decay_after)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    lowest = settings.minimum_learning_rate
    return lowest + (settings.learning_rate - lowest) * share


def describe_schedule(steps: int, settings: TrainSection) -> str:
    """The phases in words and steps: `rises to 3e-4 over 30 steps, stays to step 800, falls linearly to 0 ...`."""
    phases, peak = phases_of(steps, settings), f"{settings.learning_rate:.3g}"
    warmup = plural(phases.warmup_steps, "step")
    parts = [f"rises to {peak} over {warmup}"] if phases.warmup_steps else [f"starts at {peak}"]
    if phases.warmup_steps < phases.decay_after:
        parts.append(f"stays there to step {phases.decay_after:,}")
    if phases.decay_after < steps:
        form = "along a cosine" if settings.schedule == "cosine" else "linearly"
        parts.append(f"falls {form} towards {settings.minimum_learning_rate:.3g} to the end, step {steps:,}")
    return f"learning rate: {', '.join(parts)}"


def _share_of(share: float, steps: int) -> int:
    return min(steps, max(1, round(share * steps)))
