"""Fused norms and gates compute what the modules they replace compute, and leave alone what computes something else."""

from __future__ import annotations

import copy
import importlib
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coremill.model import fused_layers
from coremill.model.fused_layers import GATES, fuse_layers, fused_gate, fused_norm
from coremill.model.known_forwards import KNOWN_MLPS, KNOWN_NORMS, KnownForward, has_code
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
def test_a_fused_model_gives_the_same_logits_and_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "BLOCK_BYTES", 4 * 64 * 13)  # several blocks, the last one short
    model = model_of(family)
    other = copy.deepcopy(model)
    state = torch.get_rng_state()
    choice = fuse_layers(other)
    assert torch.equal(torch.get_rng_state(), state)
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    layers = model.config.num_hidden_layers
    assert choice.value == "fused" and f"{norms} RMS norms and {layers} gated MLPs" in choice.reason
    for mine, theirs in zip(outcome(other), outcome(model), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_fused_norm_in_bf16_is_as_close_to_exact_as_the_one_it_replaces(offset: float) -> None:
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
    mine = results(lambda x, weight: fused_norm(x, weight, 1e-6, offset), torch.bfloat16)
    for truth, one, other in zip(exact, mine, results(own, torch.bfloat16), strict=True):
        assert (one - truth).norm() <= 1.02 * (other - truth).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GATES)
def test_a_fused_gate_gives_the_same_bits_and_keeps_only_its_inputs(name: str, dtype: torch.dtype) -> None:
    activation = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh")}[name]
    generator = torch.Generator().manual_seed(2)
    both = torch.randn(3, 50, 2 * 4096, generator=generator).to(dtype).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        mine = fused_gate(*both.chunk(2, dim=-1), name)
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} == {both.untyped_storage().data_ptr()}
    gate, up = both.chunk(2, dim=-1)
    theirs = activation(gate) * up
    assert torch.equal(mine, theirs)
    slope = torch.randn(theirs.shape, generator=generator).to(dtype)
    assert torch.equal(torch.autograd.grad(mine, both, slope)[0], torch.autograd.grad(theirs, both, slope)[0])


# -- which modules are taken


class PlainNorm(nn.Module):
    """An RMS norm with everything a known forward may read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 1.5, 24))
        self.variance_epsilon = self.eps = 1e-6
        self.normalized_shape, self.group_size, self.with_scale = (24,), None, True


class PlainMLP(nn.Module):
    """A gated MLP with everything a known forward may read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 40), nn.Linear(24, 40)
        self.gate_up_proj, self.down_proj = nn.Linear(24, 80), nn.Linear(40, 24)
        self.act_fn = self.activation_fn = nn.SiLU()
        self.activation_sparsity, self.gate_multiplier, self.down_multiplier = 0.0, 1.0, 1.0


@pytest.mark.parametrize("form", [*KNOWN_NORMS, *KNOWN_MLPS], ids=lambda form: form.forward.__qualname__)
def test_known_forwards_are_those_of_the_fused_layers_at_any_magnitude(form: KnownForward) -> None:
    """Proof of the list itself: each entry, run as it stands, against what takes its place."""
    plain = PlainNorm if form in KNOWN_NORMS else PlainMLP
    own_class = type("Own", (plain,), {"forward": form.forward, **form.helpers})
    torch.manual_seed(1)
    own = own_class()
    taken = copy.deepcopy(own)
    assert fuse_layers(taken).value == "fused"
    magnitudes = 10.0 ** torch.arange(-6, 7).view(-1, 1, 1)  # beyond any clamp, below epsilon
    x = torch.randn(13, 5, 24) * magnitudes
    for magnitude, rows in zip(magnitudes, x, strict=True):
        results = []
        for module in (own, taken):
            given = rows.clone().requires_grad_()
            value = module(given)
            results.append((value.detach(), *torch.autograd.grad(value.square().mean(), given)))
        for theirs, mine in zip(*results, strict=True):
            close = {"rtol": 2e-5, "atol": 2e-6 * float(theirs.abs().max())}
            torch.testing.assert_close(mine, theirs, **close, msg=lambda text, m=magnitude: f"{m}: {text}")


# What each family's modules are, in the transformers that is installed: all of these are taken.
TAKEN = {
    "gemma": ("GemmaRMSNorm", "GemmaMLP"),
    "gemma3": ("Gemma3RMSNorm", "Gemma3MLP"),
    "glm4": ("Glm4RMSNorm", "Glm4MLP"),
    "granite": ("GraniteRMSNorm", "GraniteMLP"),
    "helium": ("HeliumRMSNorm", "HeliumMLP"),
    "llama": ("LlamaRMSNorm", "LlamaMLP"),
    "llama4": ("Llama4TextRMSNorm", "Llama4TextMLP"),
    "mistral": ("MistralRMSNorm", "MistralMLP"),
    "mixtral": ("MixtralRMSNorm",),
    "olmo2": ("Olmo2RMSNorm", "Olmo2MLP"),
    "phi3": ("Phi3RMSNorm", "Phi3MLP"),
    "qwen2": ("Qwen2RMSNorm", "Qwen2MLP"),
    "qwen3": ("Qwen3RMSNorm", "Qwen3MLP"),
    "qwen3_next": ("Qwen3NextRMSNorm", "Qwen3NextMLP"),
}


@pytest.mark.parametrize("family", TAKEN)
def test_modules_of_the_usual_families_are_known(family: str) -> None:
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name in TAKEN[family]:
        forward = getattr(modeling, name).forward
        assert any(has_code(forward, form.forward) for form in (*KNOWN_NORMS, *KNOWN_MLPS)), name


class OddRMSNorm(PlainNorm):
    """Built like a norm, but divides by something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class KnownRMSNorm(PlainNorm):
    """Gemma's forward around a method of its own."""

    forward = next(form.forward for form in KNOWN_NORMS if form.offset)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).clamp(max=1e3)


class ClampedMLP(PlainMLP):
    """DeepSeek-V4's, which a try with small numbers cannot tell from Llama's."""

    limit = 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x).clamp(min=-self.limit, max=self.limit)
        return self.down_proj(self.act_fn(gate) * up)


class LlamaLikeMLP(PlainMLP):
    """One that is taken as it stands."""

    forward = KNOWN_MLPS[0].forward


class Wrapped(PlainMLP):
    """Something around a known forward."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def replaced() -> nn.Module:
    module = LlamaLikeMLP()
    module.forward = lambda x: x
    return module


def hooked() -> nn.Module:
    module = LlamaLikeMLP()
    module.register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def with_attribute(module: nn.Module, name: str, value: Any) -> nn.Module:
    setattr(module, name, value)
    return module


def hooked_activation() -> nn.Module:
    module = LlamaLikeMLP()
    module.act_fn.register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def of_other_globals() -> nn.Module:
    """The same words, but `torch` is something else there."""
    known = KNOWN_NORMS[0].forward
    forward = FunctionType(known.__code__, {**known.__globals__, "torch": nn})
    return type("OtherRMSNorm", (PlainNorm,), {"forward": forward})()


LEFT = {
    "odd": (OddRMSNorm, "OddRMSNorm (another forward)"),
    "own method": (KnownRMSNorm, "KnownRMSNorm (another _norm)"),
    "two-dimensional weight": (
        lambda: with_attribute(
            type("WideRMSNorm", (PlainNorm,), {"forward": KNOWN_NORMS[0].forward})(),
            "weight",
            nn.Parameter(torch.ones(2, 24)),
        ),
        "WideRMSNorm (no weight of one dimension)",
    ),
    "other globals": (of_other_globals, "OtherRMSNorm (another forward)"),
    "clamped": (ClampedMLP, "ClampedMLP (another forward)"),
    "wrapped": (Wrapped, "Wrapped (another forward)"),
    "replaced": (replaced, "LlamaLikeMLP (its forward was replaced)"),
    "hooked": (hooked, "LlamaLikeMLP (it has hooks)"),
    "hooked activation": (hooked_activation, "LlamaLikeMLP (activation SiLU)"),
    "other activation": (lambda: with_attribute(LlamaLikeMLP(), "act_fn", nn.ReLU()), "LlamaLikeMLP (activation ReLU)"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_known_to_be_equal_is_left_alone(name: str) -> None:
    make, said = LEFT[name]
    module = make()
    before = module.__dict__.get("forward")
    choice = fuse_layers(nn.Sequential(module))
    assert choice.value == "as they are" and f"left as they are: 1 {said}" in choice.reason
    assert module.__dict__.get("forward") is before


def test_modules_of_one_class_are_decided_one_by_one() -> None:
    """Gemma 3n: the first layers keep only the largest of their gates, the others all."""
    sparse = type("SparseMLP", (PlainMLP,), {"forward": KNOWN_MLPS[3].forward})
    model = nn.Sequential(sparse(), with_attribute(sparse(), "activation_sparsity", 0.95))
    assert "0 RMS norms and 1 gated MLPs" in fuse_layers(model).reason
    assert "forward" in model[0].__dict__ and "forward" not in model[1].__dict__


@pytest.mark.parametrize("family", ["deepseek_v4", "gemma3n"])
def test_the_families_that_were_changed_in_silence(family: str) -> None:
    """Their real MLPs, where gates are large: the clamp at 10 and the top of the gates are kept."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(2)
    if family == "deepseek_v4":
        values = {"hidden_act": "silu", "mlp_bias": False, "swiglu_limit": 10.0, "intermediate_size": 16}
        modules = [modeling.DeepseekV4MLP(SimpleNamespace(hidden_size=8, **values))]
    else:
        values = {"hidden_activation": "gelu_pytorch_tanh", "activation_sparsity_pattern": [0.0, 0.95]}
        config = SimpleNamespace(hidden_size=8, intermediate_size=[16, 16], **values)
        modules = [modeling.Gemma3nTextMLP(config, layer) for layer in range(2)]
    model = nn.ModuleList(modules)
    x = 100 * torch.randn(5, 8)
    expected = [module(x) for module in model]
    fuse_layers(model)
    for module, one in zip(model, expected, strict=True):
        assert torch.equal(module(x), one)
