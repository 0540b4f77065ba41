"""Norms and gated activations that keep less for backward and stay in the cache.

Written in Python, an RMS norm leaves an fp32 copy of its input and its normalised rows behind, and a gated MLP its gate
before and after the activation. Here a norm keeps its input and one number per row, and the gate is activated again in
backward. Both go through their rows in blocks that stay in a core's cache, so that memory is read and written once, not
once per operation: with AMX this work between the products is half of a step.

Nothing here knows a model family. A module is taken over if it is built like one of these and was seen to compute the
same, values and gradients; otherwise it stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from coremill.plan.types import Choice

# Of one operand in fp32, for each thread: it and what becomes of it fit into a second-level cache.
BLOCK_BYTES = 2**19


def make_lean(model: nn.Module) -> Choice[str]:
    """Take over what can be; before the engine places the model, or after."""
    seen: dict[tuple[Any, ...], Any] = {}
    norms = mlps = left = 0
    for module in model.modules():
        key: tuple[Any, ...]
        if _built_like_a_norm(module):
            key = (type(module), _width(module), _epsilon(module))
            if key not in seen:
                seen[key] = _norm_offset(module)
            if seen[key] is None:
                left += 1
            else:
                _take_over_norm(module, seen[key])
                norms += 1
        elif _built_like_a_gated_mlp(module):
            key = (type(module), type(_activation_of(module)))
            if key not in seen:
                seen[key] = _gate_of(module)
            if seen[key] is None:
                left += 1
            else:
                _take_over_mlp(module, seen[key])
                mlps += 1
    others = f"; {left} others that compute something else stay as they are" if left else ""
    if not norms and not mlps:
        return Choice("as they are", f"no RMS norms and gated MLPs of a known form{others}")
    return Choice("lean", f"{norms} RMS norms and {mlps} gated MLPs keep less for backward, computing the same{others}")


# -- RMS norms


class _LeanNorm(torch.autograd.Function):
    """x / rms(x) * (offset + weight); all sums in fp32, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        inverse = torch.empty(rows.shape[0], 1, dtype=torch.float32)
        factor = weight.float() + offset if offset else weight.float()
        work = _work(rows)
        for block in _blocks(rows):
            given = rows[block].float()
            squares = torch.mul(given, given, out=work[: given.shape[0]])
            torch.rsqrt(torch.mean(squares, dim=1, keepdim=True).add_(epsilon), out=inverse[block])
            normalised = torch.mul(given, inverse[block], out=squares)
            torch.mul(normalised, factor, out=out[block])
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        rows, above = x.reshape(-1, x.shape[-1]), upstream.reshape(-1, x.shape[-1])
        gradient = torch.empty_like(rows, memory_format=torch.contiguous_format)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        factor = weight.float() + ctx.offset if ctx.offset else weight.float()
        mean_factor = factor / factor.numel()
        normalised_work, work = _work(rows), _work(rows)
        for block in _blocks(rows):
            one_above = above[block].float()
            count = one_above.shape[0]
            normalised = torch.mul(rows[block].float(), inverse[block], out=normalised_work[:count])
            product = torch.mul(one_above, normalised, out=work[:count])
            weight_gradient += product.sum(0)
            along = torch.mv(product, mean_factor).unsqueeze(1)  # mean of upstream * factor * normalised
            product = torch.mul(one_above, factor, out=work[:count])
            torch.mul(product.addcmul_(normalised, along, value=-1.0), inverse[block], out=gradient[block])
        return gradient.view(x.shape), weight_gradient.to(weight.dtype), None, None


def lean_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
    """RMS norm over the last dimension, times weight + offset (Gemma's weights are kept less one)."""
    result: torch.Tensor = _LeanNorm.apply(x, weight, epsilon, offset)  # type: ignore[no-untyped-call]
    return result


def _built_like_a_norm(module: nn.Module) -> bool:
    named = [name for name, _ in module.named_parameters()]
    return type(module).__name__.endswith("RMSNorm") and named == ["weight"] and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(getattr(module, name, None), float):
            return float(getattr(module, name))
    return None


def _width(module: nn.Module) -> int:
    assert isinstance(module.weight, torch.Tensor)
    return module.weight.numel()


def _norm_offset(module: nn.Module) -> float | None:
    """0 or 1 where the module's own forward is a norm with that offset; tried on numbers small enough for epsilon."""
    width, epsilon = _width(module), _epsilon(module)
    assert epsilon is not None
    weight = _numbers(width) + 0.5
    x = _numbers(3, 5, width) * torch.tensor([1.0, 1e-3, 30.0]).view(3, 1, 1)

    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(module, {"weight": weight}, (x,))
        return result

    for offset in (0.0, 1.0):
        if _same(own, lambda x, weight, offset=offset: lean_norm(x, weight, epsilon, offset), x, weight):  # type: ignore[misc]
            return offset
    return None


def _take_over_norm(module: nn.Module, offset: float) -> None:
    own, epsilon = module.forward, _epsilon(module)
    assert epsilon is not None

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if x.dtype != weight.dtype:
            result: torch.Tensor = own(x)  # which dtype comes out is for the module to say
            return result
        return lean_norm(x, weight, epsilon, offset)  # type: ignore[arg-type]

    module.forward = forward


# -- gated MLPs

# The activation, its gradient from that of its output and from its input, and what both are called with.
GATES: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "silu": (torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input, {}),
    "gelu": (torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input, {"approximate": "none"}),
    "gelu_tanh": (torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input, {"approximate": "tanh"}),
}


class _LeanGate(torch.autograd.Function):
    """activation(gate) * up, operation by operation what the modules do, so the same bits."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
        activate, _, how = GATES[name]
        gates, ups = gate.flatten(0, -2), up.flatten(0, -2)
        out = torch.empty_like(gates, memory_format=torch.contiguous_format)
        for block in _blocks(gates):
            activate(gates[block], **how, out=out[block]).mul_(ups[block])
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return out.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        activate, activate_backward, how = GATES[ctx.name]
        gates, ups, above = gate.flatten(0, -2), up.flatten(0, -2), upstream.flatten(0, -2)
        gate_gradient = torch.empty_like(gates, memory_format=torch.contiguous_format)
        up_gradient = torch.empty_like(gate_gradient)
        for block in _blocks(gates):
            activate(gates[block], **how, out=up_gradient[block]).mul_(above[block])
            product = torch.mul(above[block], ups[block], out=gate_gradient[block])
            activate_backward(product, gates[block], **how, grad_input=product)
        return gate_gradient.view(gate.shape), up_gradient.view(gate.shape), None


def lean_gate(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """The activation of that name of `gate`, times `up`."""
    result: torch.Tensor = _LeanGate.apply(gate, up, name)  # type: ignore[no-untyped-call]
    return result


def _built_like_a_gated_mlp(module: nn.Module) -> bool:
    children = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    fused = {"gate_up_proj", "down_proj"}
    return children in (fused, {"gate_proj", "up_proj", "down_proj"}) and _activation_of(module) is not None


def _activation_of(module: nn.Module) -> Any:
    return getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)


def _gate_of(module: nn.Module) -> str | None:
    """The activation with which the module's own forward is a gated MLP; tried with stand-ins for its projections."""
    gate, up = _numbers(4, 64) * 3, _numbers(4, 64, seed=2)

    def own(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        stand_ins = {"gate_proj": gate, "up_proj": up, "gate_up_proj": torch.cat([gate, up], -1)}
        children: dict[str, Any] = {name: each for name, each in module.named_children() if isinstance(each, nn.Linear)}
        for name, child in children.items():
            child.forward = functools.partial(_hand_on, stand_ins.get(name))
        try:
            result: torch.Tensor = module(torch.zeros(4, 64))
        finally:
            for child in children.values():
                del child.forward
        return result

    for name in GATES:
        if _same(own, lambda gate, up, name=name: lean_gate(gate, up, name), gate, up):  # type: ignore[misc]
            return name
    return None


def _hand_on(instead: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if instead is None else instead


def _take_over_mlp(module: nn.Module, name: str) -> None:
    mlp: Any = module  # its projections are looked up when they are called: they may have been replaced meanwhile

    def forward(x: torch.Tensor) -> torch.Tensor:
        if hasattr(mlp, "gate_up_proj"):
            gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        result: torch.Tensor = mlp.down_proj(lean_gate(gate, up, name))
        return result

    mlp.forward = forward


# -- both


def _same(own: Callable[..., torch.Tensor], lean: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> bool:
    """Whether two functions give the same values and gradients; a forward of another shape is another function."""
    found = []
    for function in (own, lean):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        try:
            with torch.enable_grad():
                value = function(*leaves)
                slope = _numbers(*value.shape, seed=3)
                found.append([value.detach(), *torch.autograd.grad(value, leaves, slope)])
        except Exception:  # whatever an unknown forward raises means that it is not the known one
            return False
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6 * float(one.abs().max()))
        for one, other in zip(*found, strict=True)
    )


def _numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random ones that leave the run's own random numbers where they are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _block_rows(rows: torch.Tensor) -> int:
    return torch.get_num_threads() * max(1, BLOCK_BYTES // (4 * rows.shape[1]))


def _blocks(rows: torch.Tensor) -> Iterator[slice]:
    count = _block_rows(rows)
    return (slice(begin, begin + count) for begin in range(0, rows.shape[0], count))


def _work(rows: torch.Tensor) -> torch.Tensor:
    """Room for one block in fp32."""
    return torch.empty(min(_block_rows(rows), rows.shape[0]), rows.shape[1], dtype=torch.float32)
