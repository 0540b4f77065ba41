"""Families that plan/families.py does not know: planned by the shapes of their weights, rather too much than too
little.

A product keeps its input for backward, and what follows it (a norm, an activation, attention) mostly keeps its output:
so a layer is taken to keep both of every matrix that a token is multiplied with. For Llama's own layers that would be
half as much again as they really keep. States of Mamba's kind are counted by their size; what other recurrent layers
keep (written out in Python on CPUs, in chunks) is not, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

from coremill.plan.attention import windows_of
from coremill.plan.families import KEPT_BY_ACTIVATION
from coremill.plan.shape import HIDDEN, ModelShape, Tensor

# As wide as the hidden state: norms written in Python keep copies, dropouts what they left out.
NORMS_KEPT = 2
DROPOUTS_KEPT = 3
# Of a state of so many numbers per channel: the decay, its exponent, the input, and the states themselves.
STATES_KEPT = 4
_STATE_KEYS = ("state_size", "ssm_state_size", "mamba_d_state")


def named_by_shape(shape: ModelShape, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors whose names said nothing: the first with a row per word is the embedding, a second one the head; without
    numbered layers all others are taken for one."""
    known = {tensor.role for tensor in tensors}
    named = []
    for tensor in tensors:
        role = tensor.role
        if role == "rest" and len(tensor.shape) == 2 and tensor.shape[0] == shape.vocabulary:
            role = next((end for end in ("embedding", "head") if end not in known), role)
            known.add(role)
        named.append(replace(tensor, role=role))
    if not any(role.isdigit() for role in known):
        named = [replace(tensor, role="0") if tensor.role == "rest" else tensor for tensor in named]
    return named


def shape_of_tensors(shape: ModelShape, tensors: Sequence[Tensor], config: Mapping[str, Any]) -> ModelShape:
    """What the tensors say goes before what Llama would have had for keys that the config leaves out."""
    embedding = next((tensor.shape for tensor in tensors if tensor.role == "embedding"), None)
    hidden = shape.hidden if not embedding or any(config.get(key) for key in HIDDEN) else embedding[-1]
    widths = [
        inside for tensor in tensors if tensor.role.isdigit() for inside, _ in [_ends(tensor)] if inside != hidden
    ]
    layers = len({tensor.role for tensor in tensors if tensor.role.isdigit()})
    tied = config.get("tie_word_embeddings")
    return replace(
        shape,
        hidden=hidden,
        vocabulary=embedding[0] if embedding else shape.vocabulary,
        intermediate=max(widths, default=4 * hidden),
        layers=layers,
        windows=windows_of(config, shape.traits, layers),
        tied=not any(tensor.role == "head" for tensor in tensors) if tied is None else bool(tied),
    )


def kept_numbers(shape: ModelShape, tensors: Sequence[Tensor], config: Mapping[str, Any]) -> int:
    """What a layer keeps for backward of one token, in the mean of all layers, attention matrices aside."""
    layers = len({tensor.role for tensor in tensors if tensor.role.isdigit()})
    routed = min(1.0, shape.experts_per_token / shape.experts) if shape.experts else 1.0
    total = 0.0
    for tensor in tensors:
        if not tensor.role.isdigit() or len(tensor.shape) < 2:
            continue
        if not tensor.is_expert:
            total += sum(_ends(tensor))
        elif len(tensor.shape) == 2:  # one of many
            total += routed * sum(_ends(tensor))
        else:
            total += max(1, shape.experts_per_token) * sum(_ends(tensor))
    # Written out in Python, a GELU keeps every factor; what is not fused keeps a gate before and after its activation.
    more = max(1, KEPT_BY_ACTIVATION.get(shape.activation, 2) - 1) * max(1, shape.experts_per_token)
    states = next((int(config[key]) for key in _STATE_KEYS if isinstance(config.get(key), int)), 0)
    hidden_wide = NORMS_KEPT + (DROPOUTS_KEPT if shape.residual_dropout else 0)
    per_layer = hidden_wide * shape.hidden + (more + STATES_KEPT * states) * shape.intermediate
    return ceil(total / max(1, layers)) + per_layer


def has_recurrent_layers(config: Mapping[str, Any]) -> bool:
    """Whether some layers carry a state along instead of attending to a row."""
    types = config.get("layer_types")
    kinds = {str(kind) for kind in types} if isinstance(types, list) else set()
    return any("linear" in kind or "hybrid" in kind for kind in kinds) or any(key in config for key in _STATE_KEYS)


def _ends(tensor: Tensor) -> tuple[int, int]:
    """How wide the input and the output of a product with it are; experts that are merged come first."""
    shape = tensor.shape[1:] if tensor.is_expert and len(tensor.shape) > 2 else tensor.shape
    return prod(shape[1:]), shape[0]
