"""The rule that tells a loss spike from noise."""

from __future__ import annotations

import math
import random

from coremill.report.spikes import Spike, loss_spikes


def a_run(seed: int, steps: int = 400, noise: float = 0.05) -> list[float]:
    generator = random.Random(seed)
    return [2.5 + 6 * math.exp(-step / 60) + generator.gauss(0, noise) for step in range(steps)]


def flagged(losses: list[float | None]) -> list[Spike]:
    return loss_spikes(enumerate(losses, 1))


def test_ordinary_runs_are_not_flagged():
    assert [seed for seed in range(100) if flagged(a_run(seed, steps=1000, noise=0.01 + seed / 500))] == []


def test_a_spike_is_flagged_with_its_steps_and_what_was_usual():
    losses = a_run(1)
    losses[200:203] = [5.1, 7.25, 4.4]
    (spike,) = flagged(losses)
    assert (spike.first_step, spike.last_step, spike.loss) == (201, 203, 7.25)
    assert abs(spike.usual - 2.75) < 0.15
    assert str(spike).startswith("loss spike at step 201 to 203: 7.25, where 2.")


def test_two_spikes_are_two():
    losses = a_run(2)
    losses[100] = losses[300] = 9.0
    assert [spike.first_step for spike in flagged(losses)] == [101, 301]


def test_a_jump_that_stays_is_flagged_until_it_is_the_usual():
    losses = a_run(3) + [8.0] * 200
    (spike,) = flagged(losses)
    assert spike.first_step == 401 and spike.last_step < 401 + 48


def test_losses_that_never_move_are_not_flagged_for_a_little():
    assert flagged([3.0] * 100 + [3.2] + [3.0] * 20) == []
    assert [spike.first_step for spike in flagged([3.0] * 100 + [3.4] + [3.0] * 20)] == [101]


def test_the_first_steps_and_numbers_that_are_none_are_passed_over():
    assert flagged([9.0, 90.0, *a_run(4)[2:]]) == []
    losses: list[float | None] = [*a_run(5)]
    losses[150], losses[151], losses[152] = None, math.nan, math.inf
    assert flagged(losses) == []
