"""Lean norms and gates compute what the modules they replace compute, and leave alone what computes something else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coremill.model import lean
from coremill.model.lean import GATES, lean_gate, lean_norm, make_lean
from unit.plan.shapes import TINY_CONFIGS

RMS_FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3"]


def model_of(family: str) -> Any:
    values = next(values for values in TINY_CONFIGS.values() if values["model_type"] == family)
    config = CONFIG_MAPPING[family](**{key: value for key, value in values.items() if key != "model_type"})
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms that are not all ones
    return model


def outcome(model: Any) -> list[torch.Tensor]:
    """Logits and all gradients."""
    logits = model(input_ids=torch.arange(48).view(2, 24) % 90, use_cache=False).logits
    logits.square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("family", RMS_FAMILIES)
def test_a_lean_model_gives_the_same_logits_and_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "BLOCK_BYTES", 4 * 64 * 13)  # several blocks, the last one short
    model = model_of(family)
    other = copy.deepcopy(model)
    state = torch.get_rng_state()
    choice = make_lean(other)
    assert torch.equal(torch.get_rng_state(), state)
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    layers = model.config.num_hidden_layers
    assert choice.value == "lean" and f"{norms} RMS norms and {layers} gated MLPs" in choice.reason
    for mine, theirs in zip(outcome(other), outcome(model), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_lean_norm_in_bf16_is_as_close_to_exact_as_the_one_it_replaces(offset: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight, slope = (torch.randn(shape, generator=generator).bfloat16() for shape in ((40, 96), (96,), (40, 96)))

    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if offset:
            return (normalised * (1.0 + weight.float())).to(x.dtype)
        return weight * normalised.to(x.dtype)

    def results(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        value = function(*leaves)
        return [value.double(), *(each.double() for each in torch.autograd.grad(value, leaves, slope.to(dtype)))]

    exact = results(own, torch.float32)
    mine = results(lambda x, weight: lean_norm(x, weight, 1e-6, offset), torch.bfloat16)
    for truth, one, other in zip(exact, mine, results(own, torch.bfloat16), strict=True):
        assert (one - truth).norm() <= 1.02 * (other - truth).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GATES)
def test_a_lean_gate_gives_the_same_bits_and_keeps_only_its_inputs(name: str, dtype: torch.dtype) -> None:
    activation = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh")}[name]
    generator = torch.Generator().manual_seed(2)
    both = torch.randn(3, 50, 2 * 4096, generator=generator).to(dtype).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        mine = lean_gate(*both.chunk(2, dim=-1), name)
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} == {both.untyped_storage().data_ptr()}
    gate, up = both.chunk(2, dim=-1)
    theirs = activation(gate) * up
    assert torch.equal(mine, theirs)
    slope = torch.randn(theirs.shape, generator=generator).to(dtype)
    assert torch.equal(torch.autograd.grad(mine, both, slope)[0], torch.autograd.grad(theirs, both, slope)[0])


class OddRMSNorm(nn.Module):
    """Built like a norm, but divides by something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class OddMLP(nn.Module):
    """Built like a gated MLP, but adds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))
        return result


def test_what_computes_something_else_is_left_alone() -> None:
    model = nn.Sequential(OddRMSNorm(), OddMLP(), nn.LayerNorm(8))
    expected = model(torch.ones(2, 8))
    choice = make_lean(model)
    assert choice.value == "as they are" and "2 others that compute something else stay" in choice.reason
    assert torch.equal(model(torch.ones(2, 8)), expected)
    assert all("forward" not in module.__dict__ for module in model.modules())
