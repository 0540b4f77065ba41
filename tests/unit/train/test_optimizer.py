"""The learning rate over the steps, and what is decayed."""

import pytest
import torch

from coremill.config.schema import TrainSection
from coremill.train.optimizer import make_optimizer
from coremill.train.schedule import learning_rate_at


def _rates(**settings):
    section = TrainSection(steps=10, learning_rate=1.0, **settings)
    return [learning_rate_at(step, 10, section) for step in range(1, 11)]


def test_warm_up_rises_in_equal_parts_to_the_peak():
    assert _rates(schedule="constant", warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_starts_at_the_peak_falls_and_ends_above_zero(schedule):
    rates = _rates(schedule=schedule, warmup_steps=2)
    assert rates[1] == rates[2] == 1.0
    assert all(later < earlier for earlier, later in zip(rates[2:], rates[3:], strict=False))
    assert 0 < rates[-1] < 0.2


def test_linear_decay_loses_the_same_amount_each_step():
    assert _rates(schedule="linear") == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_vectors_are_not_decayed_and_the_fused_kernel_is_used():
    matrix, vector = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4))
    optimizer = make_optimizer(
        [("a", matrix), ("b", vector)], TrainSection(steps=1, weight_decay=0.5, learning_rate=0.1)
    )
    assert optimizer.defaults["fused"] is True
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert matrix[0, 0].item() == pytest.approx(0.95)
    assert vector[0].item() == 1.0
