"""The learning rate over the steps, and what is decayed."""

import pytest
import torch

from coremill.config.schema import TrainSection
from coremill.engines.optimizers import optimizer_of
from coremill.engines.optimizers.adamw import AdamW, undecayed
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


def test_what_is_left_out_is_not_decayed_and_the_fused_kernel_is_used():
    model = torch.nn.Linear(4, 4)
    settings = TrainSection(steps=1, weight_decay=0.5, learning_rate=0.1)
    optimizer = AdamW(model, list(model.named_parameters()), optimizer_of(settings))
    assert optimizer.defaults["fused"] is True
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert model.weight[0, 0].item() == pytest.approx(0.95)
    assert model.bias[0].item() == 1.0


class HeadNorm(torch.nn.Module):
    """A norm with a row for each head (Cohere's of queries and keys)."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))


class Parts(torch.nn.Module):
    """One of each kind."""

    def __init__(self):
        super().__init__()
        self.lookup = torch.nn.Embedding(5, 4)
        self.queries = HeadNorm()
        self.router_norm = torch.nn.Linear(4, 4, bias=False)
        self.product = torch.nn.Linear(4, 4)
        self.up_proj_bias = torch.nn.Parameter(torch.ones(3, 4))  # of three experts (GPT-OSS)
        self.up_proj = torch.nn.Parameter(torch.ones(3, 4, 4))
        self.sinks = torch.nn.Parameter(torch.ones(4))
        self.ln = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.lookup.weight


def test_biases_and_norms_are_left_out_whatever_their_dimension():
    model = Parts()
    decayed = {name for name, _ in model.named_parameters()} - undecayed(model)
    assert decayed == {"lookup.weight", "product.weight", "up_proj"}


def test_patterns_leave_out_more_by_any_name_of_a_tied_weight():
    model = Parts()
    assert undecayed(model, ["head.*"]) - undecayed(model) == {"lookup.weight"}
    assert undecayed(model, ["prod*.weight", "up_proj"]) - undecayed(model) == {"product.weight", "up_proj"}
    settings = TrainSection(steps=1, weight_decay=0.5, no_decay=["product.*"])
    decayed, others = AdamW(model, list(model.named_parameters()), optimizer_of(settings)).param_groups
    assert not any(each is model.product.weight for each in decayed["params"]) and decayed["weight_decay"] == 0.5
    assert any(each is model.product.weight for each in others["params"]) and others["weight_decay"] == 0.0
