"""Norms and gated activations that keep less for backward and stay in the cache.

Written in Python, an RMS norm leaves an fp32 copy of its input and its normalised rows behind, and a gated MLP its gate
before and after the activation. Here a norm keeps its input and one number per row, and the gate is activated again in
backward. Both go through their rows in blocks that stay in a core's cache, so that memory is read and written once, not
once per operation: with AMX this work between the products is half of a step.

Nothing here knows a model family. A module is taken over if its forward is, word for word, one that these are known to
equal (model/known_forwards.py); otherwise it stays as it is, and the choice says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from coremill.model.known_forwards import KNOWN_MLPS, KNOWN_NORMS, find_known, gate_of
from coremill.plan.types import Choice

# Of one operand in fp32, for each thread: it and what becomes of it fit into a second-level cache.
BLOCK_BYTES = 2**19


def fuse_layers(model: nn.Module) -> Choice[str]:
    """Take over what can be; before the engine places the model, or after."""
    taken: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for module in model.modules():
        for kind, take_over, looks_like in (
            ("RMS norms", _take_over_norm, _looks_like_a_norm),
            ("gated MLPs", _take_over_mlp, _looks_like_a_gated_mlp),
        ):
            reason = take_over(module)
            if reason is None:
                taken[kind] += 1
            elif looks_like(module):
                left[f"{type(module).__name__} ({reason})"] += 1
    stay = ", ".join(f"{count} {what}" for what, count in left.items())
    others = f"; left as they are: {stay}" if left else ""
    if not taken:
        return Choice("as they are", f"no RMS norms and gated MLPs of a known form{others}")
    counts = " and ".join(f"{taken[kind]} {kind}" for kind in ("RMS norms", "gated MLPs"))
    return Choice("fused", f"{counts} keep less for backward, computing the same{others}")


# -- RMS norms


class _FusedNorm(torch.autograd.Function):
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
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        factor = weight.float() + ctx.offset if ctx.offset else weight.float()
        mean_factor = factor / factor.numel()
        normalised_work, work = _work(rows), _work(rows)
        for block in _blocks(rows):
            one_above = above[block].float()
            count = one_above.shape[0]
            normalised = torch.mul(rows[block].float(), inverse[block], out=normalised_work[:count])
            product = torch.mul(one_above, normalised, out=work[:count])
            if weight_gradient is not None:
                weight_gradient += product.sum(0)
            along = torch.mv(product, mean_factor).unsqueeze(1)  # mean of upstream * factor * normalised
            product = torch.mul(one_above, factor, out=work[:count])
            torch.mul(product.addcmul_(normalised, along, value=-1.0), inverse[block], out=gradient[block])
        of_weight = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return gradient.view(x.shape), of_weight, None, None


def fused_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
    """RMS norm over the last dimension, times weight + offset (Gemma's weights are kept less one)."""
    result: torch.Tensor = _FusedNorm.apply(x, weight, epsilon, offset)  # type: ignore[no-untyped-call]
    return result


def _looks_like_a_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and module._parameters.get("weight") is not None


def _take_over_norm(module: nn.Module) -> str | None:
    """Put the fused form in place of this module's forward, or say why not."""
    form = find_known(module, KNOWN_NORMS)
    if isinstance(form, str):
        return form
    epsilon, weight = getattr(module, form.epsilon, None), module._parameters.get("weight")
    if not isinstance(epsilon, float):
        return f"{form.epsilon} is {epsilon}"
    if weight is None or weight.dim() != 1:
        return "no weight of one dimension"
    own, offset = module.forward, form.offset

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        if x.dtype != weight.dtype or x.shape[-1] != weight.shape[0]:
            result: torch.Tensor = own(x)  # which dtype comes out is for the module to say
            return result
        return fused_norm(x, weight, epsilon, offset)

    module.forward = forward
    return None


# -- gated MLPs

# The activation, its gradient from that of its output and from its input, and what both are called with.
GATES: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "silu": (torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input, {}),
    "gelu": (torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input, {"approximate": "none"}),
    "gelu_tanh": (torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input, {"approximate": "tanh"}),
}


class _FusedGate(torch.autograd.Function):
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


def fused_gate(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """The activation of that name of `gate`, times `up`."""
    result: torch.Tensor = _FusedGate.apply(gate, up, name)  # type: ignore[no-untyped-call]
    return result


def _looks_like_a_gated_mlp(module: nn.Module) -> bool:
    names = set(module._modules)
    return "down_proj" in names and ("gate_up_proj" in names or {"gate_proj", "up_proj"} <= names)


def _take_over_mlp(module: nn.Module) -> str | None:
    """Put the fused form in place of this module's forward, or say why not."""
    form = find_known(module, KNOWN_MLPS)
    if isinstance(form, str):
        return form
    activation = getattr(module, form.activation, None)
    gate_name = gate_of(activation)
    if gate_name is None:
        return f"activation {type(activation).__name__}"
    mlp: Any = module  # its projections are looked up when they are called: they may have been replaced meanwhile

    def forward(x: torch.Tensor) -> torch.Tensor:
        if form.merged:
            gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        result: torch.Tensor = mlp.down_proj(fused_gate(gate, up, gate_name))
        return result

    mlp.forward = forward
    return None


# -- both


def _block_rows(rows: torch.Tensor) -> int:
    return torch.get_num_threads() * max(1, BLOCK_BYTES // (4 * rows.shape[1]))


def _blocks(rows: torch.Tensor) -> Iterator[slice]:
    count = _block_rows(rows)
    return (slice(begin, begin + count) for begin in range(0, rows.shape[0], count))


def _work(rows: torch.Tensor) -> torch.Tensor:
    """Room for one block in fp32."""
    return torch.empty(min(_block_rows(rows), rows.shape[0]), rows.shape[1], dtype=torch.float32)
