"""Forwards that the fused layers (fused_layers.py) are known to equal, as models write them, and which module has one.

A module's forward is held against these by its code, as it was compiled: the same operations on the same attributes in
the same order, with the same global names. Names of local variables, annotations and comments play no part. Numbers
are never tried: a clamp at 10 shows on no sample below it. What a forward reads of its module beside weights, such as
an activation or a switch, is looked at for each module, not once for its class.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

NOT_KNOWN = "another forward"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, kw_only=True)
class KnownForward:
    """A forward and what must hold of a module that has it."""

    forward: Callable[..., Any]
    helpers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # methods it calls
    when: Mapping[str, Any] = field(default_factory=dict)  # attributes that must have just these values


@dataclass(frozen=True, kw_only=True)
class KnownNorm(KnownForward):
    """x / rms(x) * (offset + weight), with fp32 sums."""

    epsilon: str = "variance_epsilon"  # where a module keeps it
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KnownMlp(KnownForward):
    """down_proj(activation(gate) * up)."""

    activation: str = "act_fn"  # where a module keeps it
    merged: bool = False  # gate and up are the halves of one product


Known = TypeVar("Known", bound=KnownForward)


def find_known(module: nn.Module, forms: Sequence[Known]) -> Known | str:
    """The form whose forward this module has, or why it has none."""
    reason = NOT_KNOWN
    for form in forms:
        if has_code(type(module).forward, form.forward):
            different = _what_is_different(module, form)
            if different is None:
                return form
            reason = different
    return reason


def _what_is_different(module: nn.Module, form: KnownForward) -> str | None:
    if any(name in module.__dict__ for name in ("forward", *form.helpers)):
        return "its forward was replaced"
    if any(getattr(module, name) for name in HOOKS):
        return "it has hooks"
    for name, helper in form.helpers.items():
        if not has_code(getattr(type(module), name, None), helper):
            return f"another {name}"
    for name, value in form.when.items():
        found = getattr(module, name, None)
        if found != value:
            return f"{name} is {found}"
    return None


@functools.cache
def has_code(function: Any, known: Any) -> bool:
    """Whether a function does what a known one does, word for word but for the names of its own variables."""
    if function is known:
        return True
    if not isinstance(function, FunctionType) or not isinstance(known, FunctionType) or function.__closure__:
        return False
    if function.__defaults__ != known.__defaults__ or function.__kwdefaults__ != known.__kwdefaults__:
        return False
    ours, theirs = _operations(known), _operations(function)
    return ours == theirs and all(
        function.__globals__.get(name) is known.__globals__.get(name)
        for name in known.__code__.co_names
        if name in known.__globals__
    )


def _operations(function: FunctionType) -> list[tuple[str, Any]]:
    """What the interpreter runs; a local variable is its number."""
    code = function.__code__
    shape = ("arguments", (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x0C))
    return [shape] + [
        (each.opname, each.arg if each.opcode in dis.haslocal else _plain(each.argval))
        for each in dis.get_instructions(code)
    ]


def _plain(value: Any) -> Any:
    """Told apart by type as well: 1 and 1.0 are equal, and so are 0.0 and -0.0."""
    return value if value is None or isinstance(value, str | int) and not isinstance(value, bool) else repr(value)


# -- RMS norms


def _norm_rounded_before_the_weight(self: Any, hidden_states: Any) -> Any:
    """Llama, Qwen, Mistral, Phi-3, Granite, GLM and most others."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _norm_rounded_after_the_weight(self: Any, hidden_states: Any) -> Any:
    """OLMo 2 and 3, gpt-oss."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)


def _norm_with_fp32_weight(self: Any, hidden_states: Any) -> Any:
    """Helium, Nemotron-H."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)


def _normalised(self: Any, x: Any) -> Any:
    """`_norm` of Gemma 1 to 3, Qwen 3.5, Moshi and Llama 4."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _normalised_by_power(self: Any, hidden_states: Any) -> Any:
    """`_norm` of Gemma 3n and 4."""
    mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.eps
    return hidden_states * torch.pow(mean_squared, -0.5)


def _normalised_in_groups(self: Any, x: Any) -> Any:
    """`_norm` of Qwen 4, which has no groups as a rule."""
    if self.group_size is not None:
        x = x.reshape(*x.shape[:-1], -1, self.group_size)
    out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return out.flatten(-2) if self.group_size is not None else out


def _norm_less_one(self: Any, x: Any) -> Any:
    """Gemma 1 to 3, Qwen 3.5: weights are kept less one."""
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


def _norm_of_moshi(self: Any, x: Any) -> Any:
    output = self._norm(x.float())
    output = output * self.weight.float()
    return output.type_as(x)


def _norm_of_llama4(self: Any, x: Any) -> Any:
    output = self._norm(x.float()).type_as(x)
    return output * self.weight


def _norm_of_gemma4(self: Any, hidden_states: Any) -> Any:
    """Gemma 3n too."""
    normed_output = self._norm(hidden_states.float())
    if self.with_scale:
        normed_output = normed_output * self.weight.float()
    return normed_output.type_as(hidden_states)


KNOWN_NORMS = (
    KnownNorm(forward=_norm_rounded_before_the_weight),
    KnownNorm(forward=_norm_rounded_after_the_weight),
    KnownNorm(forward=_norm_with_fp32_weight),
    KnownNorm(forward=_norm_less_one, helpers={"_norm": _normalised}, epsilon="eps", offset=1.0),
    KnownNorm(
        forward=_norm_less_one,
        helpers={"_norm": _normalised_in_groups},
        when={"group_size": None},
        epsilon="eps",
        offset=1.0,
    ),
    KnownNorm(forward=_norm_of_moshi, helpers={"_norm": _normalised}, epsilon="eps"),
    KnownNorm(forward=_norm_of_llama4, helpers={"_norm": _normalised}, epsilon="eps"),
    KnownNorm(
        forward=_norm_of_gemma4, helpers={"_norm": _normalised_by_power}, when={"with_scale": True}, epsilon="eps"
    ),
    KnownNorm(forward=nn.RMSNorm.forward, epsilon="eps"),
)


# -- gated MLPs


def _mlp_of_llama(self: Any, x: Any) -> Any:
    """Most others as well."""
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _mlp_of_llama4(self: Any, x: Any) -> Any:
    down_proj = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(down_proj)


def _mlp_of_phi3(self: Any, hidden_states: Any) -> Any:
    """GLM as well."""
    up_states = self.gate_up_proj(hidden_states)
    gate, up_states = up_states.chunk(2, dim=-1)
    up_states = up_states * self.activation_fn(gate)
    return self.down_proj(up_states)


def _mlp_of_gemma3n(self: Any, hidden_states: Any) -> Any:
    gate_proj = self.gate_proj(hidden_states)
    if self.activation_sparsity > 0.0:
        gate_proj = self._gaussian_topk(gate_proj)
    activations = self.act_fn(gate_proj)
    up_proj = self.up_proj(hidden_states)
    down_proj = self.down_proj(activations * up_proj)
    return down_proj


def _mlp_of_recurrent_gemma(self: Any, hidden_states: Any) -> Any:
    gate = self.act_fn(self.gate_proj(hidden_states))
    return self.down_proj(gate * self.up_proj(hidden_states))


def _mlp_of_falcon_h1(self: Any, x: Any) -> Any:
    y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_multiplier)
    y = self.down_proj(y) * self.down_multiplier
    return y


KNOWN_MLPS = (
    KnownMlp(forward=_mlp_of_llama),
    KnownMlp(forward=_mlp_of_llama4, activation="activation_fn"),
    KnownMlp(forward=_mlp_of_phi3, activation="activation_fn", merged=True),
    KnownMlp(forward=_mlp_of_gemma3n, when={"activation_sparsity": 0.0}),
    KnownMlp(forward=_mlp_of_recurrent_gemma),
    KnownMlp(forward=_mlp_of_falcon_h1, when={"gate_multiplier": 1.0, "down_multiplier": 1.0}),
)


# -- activations


def _silu(self: Any, input: Any) -> Any:
    return nn.functional.silu(input)


def _act(self: Any, input: Any) -> Any:
    return self.act(input)


def gate_of(activation: Any) -> str | None:
    """Under which name fused_gate has this activation; None where it has not."""
    if not isinstance(activation, nn.Module):
        return "silu" if activation is nn.functional.silu else None
    if type(activation) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}[activation.approximate]
    silu = (KnownForward(forward=_silu), KnownForward(forward=nn.SiLU.forward))
    if not isinstance(find_known(activation, silu), str):
        return "silu"
    if isinstance(find_known(activation, (KnownForward(forward=_act),)), str):
        return None
    act = activation.act
    if isinstance(act, functools.partial) and not act.args and act.keywords == {"approximate": "tanh"}:
        return "gelu_tanh" if act.func is nn.functional.gelu else None
    return "gelu" if act is nn.functional.gelu else None
