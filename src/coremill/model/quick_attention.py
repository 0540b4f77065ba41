"""Causal attention whose backward is matrix products, for CPUs with matrix units in bf16.

torch's flash kernel takes five to six times as long backward as forward there, where arithmetic asks for 2.5. Here
backward makes the scores again, a block of queries at a time for a few heads, by products that go to the matrix units,
with softmax and its derivative in one pass each. Forward is the flash kernel's own, and less is kept of it: neither its
output nor the sums of rows. Scores are rounded to bf16 before the softmax, as eager attention of a bf16 model does. So
what all keys have in common is taken off them first: no gradient depends on it, and large scores are rounded coarsely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coremill.hardware.probe import affinity_mask
from coremill.hardware.topology import read_isa

BLOCK = 256  # queries at a time: what lies above the diagonal is mostly left out
TOKENS_PER_THREAD = 2048  # of the heads of a thread at a time: their scores stay in the cache


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        grouped = key.shape[1] != query.shape[1]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        return *attention_backward(gradients[0], *ctx.saved_tensors, ctx.scale), None


# One operation to who watches a step (train/watched_step.py).
@torch.library.custom_op("coremill::attention_backward", mutates_args=())
def attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, all [rows, heads, tokens, width]; keys may serve several heads."""
    rows, heads, tokens, width = query.shape
    sharing = heads // key.shape[1]
    groups = rows * key.shape[1]
    queries = (query * scale).reshape(groups, sharing, tokens, width)
    keys = (key - key.mean(2, keepdim=True, dtype=torch.float32)).to(key.dtype).reshape(groups, tokens, width)
    values = value.reshape(groups, tokens, value.shape[-1])
    outputs = gradient.reshape(groups, sharing, tokens, value.shape[-1])
    of_queries, of_keys, of_values = torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)
    unseen = torch.full((BLOCK, BLOCK), float("-inf"), dtype=query.dtype).triu_(1)
    at_once = max(1, max(1, TOKENS_PER_THREAD // tokens) * torch.get_num_threads() // sharing)
    for first in range(0, groups, at_once):
        some = slice(first, first + at_once)
        for begin in reversed(range(0, tokens, BLOCK)):
            end = min(begin + BLOCK, tokens)
            length = end - begin
            q, out = queries[some, :, begin:end].flatten(1, 2), outputs[some, :, begin:end].flatten(1, 2)
            k, v = keys[some, :end], values[some, :end]
            scores = torch.bmm(q, k.transpose(1, 2))
            scores.view(-1, sharing, length, end)[..., begin:].add_(unseen[:length, :length])
            probabilities = torch.softmax(scores, -1)
            of_scores = torch.bmm(out, v.transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_scores, probabilities, -1, query.dtype)
            of_queries[some, :, begin:end] = torch.bmm(of_scores, k).view(-1, sharing, length, width)
            if end == tokens:  # the last block sees all keys
                torch.bmm(of_scores.transpose(1, 2), q, out=of_keys[some])
                torch.bmm(probabilities.transpose(1, 2), out, out=of_values[some])
            else:
                of_keys[some, :end].baddbmm_(of_scores.transpose(1, 2), q)
                of_values[some, :end].baddbmm_(probabilities.transpose(1, 2), out)
    return of_queries.mul_(scale).view(query.shape), of_keys.view(key.shape), of_values.view(value.shape)


_OTHER_ARITHMETIC = ("position_bias", "softcap", "cache")
_changed: WeakSet[nn.Module] = WeakSet()
_before: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]


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
    """What was registered before, unless this is plain causal attention of a model in bf16."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    plain = attention_mask is None and not dropout and all(more.get(name) is None for name in _OTHER_ARITHMETIC)
    known = query.dtype == torch.bfloat16 and query.shape[2] == key.shape[2] and key.shape[3] == value.shape[3]
    learns = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if not (causal and plain and known and learns and module in _changed):
        other: tuple[torch.Tensor, None] = _before(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
        )
        return other
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    result: torch.Tensor = _CausalAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2).contiguous(), None


def quicken_attention(model: PreTrainedModel) -> str | None:
    """Before the engine places the model; what is done, None where nothing is."""
    if model.config._attn_implementation != "sdpa" or "amx_bf16" not in read_isa(affinity_mask()):
        return None
    global _before
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not _attention:
        _before = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = _attention
    _changed.update(model.modules())
    return "causal attention in bf16 goes backward by products, for the matrix units"
