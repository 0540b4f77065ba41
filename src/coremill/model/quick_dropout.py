"""Dropout whose random bits are looked up instead of drawn.

torch draws the mask of a dropout on a CPU with one thread, an element at a time: more than half of a step of BERT-large
on 16 cores. Here the bits lie in a table, made once and the same everywhere; a call draws only where in the table each
stretch of its mask begins, from torch's generator, so that ranks differ, a continuation goes on with the same bits and
recomputed activations get the mask they had. Backward looks the mask up again: nothing is kept for it. The share that
is dropped is the asked one to 1/65536.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coremill.plan.types import Choice

STRETCH = 1 << 20  # elements that lie in the table as they do in the mask
PLACES = 1 << 22  # where a stretch may begin
LEVELS = 1 << 16
_table: torch.Tensor | None = None


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, share: float) -> torch.Tensor:
        places = torch.randint(0, PLACES, (-(-values.numel() // STRETCH),)).tolist()
        ctx.places, ctx.share = places, share
        return _masked(values, places, share)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _masked(gradients[0], ctx.places, ctx.share), None


def dropped(values: torch.Tensor, share: float) -> torch.Tensor:
    """`values` with about so many of them zero, the others larger to make up for it."""
    result: torch.Tensor = _Dropped.apply(values, share)  # type: ignore[no-untyped-call]
    return result


def _masked(values: torch.Tensor, places: list[int], share: float) -> torch.Tensor:
    """Values of one stretch after the other times 0 or 1 / (1 - share)."""
    left_out = min(LEVELS - 1, round(share * LEVELS))
    result = values.contiguous().clone()
    flat, table, scale = result.view(-1), _random_levels(), LEVELS / (LEVELS - left_out)
    for index, place in enumerate(places):
        part = flat[index * STRETCH : (index + 1) * STRETCH]
        kept = table[place : place + len(part)] >= left_out - LEVELS // 2
        part.mul_(kept).mul_(scale)
    return result


def _random_levels() -> torch.Tensor:
    """int16, evenly spread."""
    global _table
    if _table is None:
        generator = torch.Generator().manual_seed(20)
        size = (PLACES + STRETCH,)
        _table = torch.randint(-LEVELS // 2, LEVELS // 2, size, dtype=torch.int16, generator=generator)
    return _table


class QuickDropout(nn.Dropout):
    """In the place of torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return dropped(input, self.p) if self.training and 0 < self.p < 1 else super().forward(input)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' own, unless probabilities are to be dropped: torch has no quick kernel for that."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = causal and attention_mask is None and query.shape[2] > 1
    if not 0 < dropout < 1 or causal or more.get("position_bias") is not None:
        own: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
        )
        return own
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = torch.matmul(query * (query.shape[-1] ** -0.5 if scaling is None else scaling), key.transpose(2, 3))
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:  # as numbers: to fill by it, autograd would keep it
            # Not -inf: a query of padding may see no key at all (ModernBERT's windows), and would be no number for all.
            hidden = torch.finfo(scores.dtype).min
            attention_mask = scores.new_zeros(attention_mask.shape).masked_fill_(~attention_mask, hidden)
        scores = scores + attention_mask
    probabilities = dropped(torch.softmax(scores, -1), dropout)
    return torch.matmul(probabilities, value).transpose(1, 2).contiguous(), None


def quicken_dropout(model: PreTrainedModel) -> Choice[str] | None:
    """Before the engine places the model; None: it has no dropout. Adapters keep their own."""
    places = [
        (parent, name)
        for prefix, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Dropout and child.p > 0 and "lora_" not in f"{prefix}.{name}"
    ]
    for parent, name in places:
        setattr(parent, name, QuickDropout(getattr(parent, name).p))
    if not places:
        return None
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _attention
    return Choice("looked up", f"masks of {len(places)} dropouts come from a table: torch draws them with one thread")
