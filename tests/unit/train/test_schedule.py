"""Schedules with a minimum, shares of the run, and a stable middle."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.config.schema import TrainSection
from coremill.train.schedule import describe_schedule, learning_rate_at, phases_of


def section(**settings: Any) -> TrainSection:
    return TrainSection.model_validate({"steps": 10, "learning_rate": 1.0, **settings})


def rates(**settings: Any) -> list[float]:
    return [learning_rate_at(step, 10, section(**settings)) for step in range(1, 11)]


def test_rates_of_earlier_releases_keep_their_bits():
    """Written down as 0.2.0 computed them."""
    for peak in (2.0e-5, 3e-4, 1.0):
        for step in range(3, 11):
            progress = (step - 1 - 2) / 8
            linear = learning_rate_at(step, 10, section(learning_rate=peak, warmup_steps=2))
            assert linear == peak * (1 - progress)
            cosine = learning_rate_at(step, 10, section(learning_rate=peak, warmup_steps=2, schedule="cosine"))
            assert cosine == peak * (0.5 * (1 + math.cos(math.pi * progress)))
        assert learning_rate_at(1, 10, section(learning_rate=peak, warmup_steps=2)) == peak * 1 / 2


def test_the_decay_ends_at_the_minimum():
    linear = rates(minimum_learning_rate=0.1)
    assert linear == pytest.approx([1, 0.91, 0.82, 0.73, 0.64, 0.55, 0.46, 0.37, 0.28, 0.19])
    assert learning_rate_at(11, 10, section(minimum_learning_rate=0.1)) == pytest.approx(0.1)
    assert learning_rate_at(11, 10, section(minimum_learning_rate=0.1, schedule="cosine")) == pytest.approx(0.1)


def test_stable_then_a_linear_decay_over_the_last_share():
    settings: dict[str, Any] = {"schedule": "warmup-stable-decay", "warmup_share": 0.2, "decay_share": 0.4}
    assert rates(**settings) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert describe_schedule(10, section(**settings)) == (
        "learning rate: rises to 1 over 2 steps, stays there to step 6, falls linearly towards 0 to the end, step 10"
    )
    assert phases_of(100, section(schedule="warmup-stable-decay")).decay_after == 80  # a fifth where nothing is said


@settings(deadline=None)
@given(
    steps=st.integers(1, 5000),
    schedule=st.sampled_from(["linear", "cosine", "constant", "warmup-stable-decay"]),
    warmup=st.none() | st.floats(0.001, 0.9),
    decay=st.floats(0.001, 1.0),
    lowest=st.floats(0, 0.5),
)
def test_a_rate_rises_to_its_peak_once_and_never_falls_below_the_minimum(
    steps: int, schedule: str, warmup: float | None, decay: float, lowest: float
) -> None:
    settings = section(
        steps=steps,
        schedule=schedule,
        warmup_share=warmup,
        minimum_learning_rate=lowest,
        decay_share=decay if schedule == "warmup-stable-decay" else None,
    )
    phases = phases_of(steps, settings)
    assert 0 <= phases.warmup_steps < steps and phases.warmup_steps <= phases.decay_after <= steps
    every = [learning_rate_at(step, steps, settings) for step in range(1, steps + 1)]
    risen, falling = every[: phases.warmup_steps], every[phases.warmup_steps :]
    assert all(a < b for a, b in zip(risen, risen[1:], strict=False)) and max(every) == 1.0
    assert all(a >= b for a, b in zip(falling, falling[1:], strict=False)) and falling[-1] >= lowest
    assert describe_schedule(steps, settings)
