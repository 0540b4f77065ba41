"""The gradient of a table that is both lookup and head: one tensor of its size instead of two.

Autograd would hold the head's gradient through the whole of backward, have the lookup make a second one, nearly all
zeros, and add the two. Here the head's backward leaves its gradient with the lookup of the same pass, whose backward
comes last and adds the rows of the tokens it saw: equal tokens are summed in fp32 first, so a row is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from coremill.model.build import has_plain_lookup


class Handover:
    """Where the head's backward leaves the table's gradient of one forward pass."""

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None


class _Lookup(torch.autograd.Function):
    """Rows of a table; its gradient is what was handed over, with the gradients of these rows added."""

    @staticmethod
    def forward(
        ctx: Any, table: torch.Tensor, token_ids: torch.Tensor, padding_id: int | None, handover: Handover
    ) -> torch.Tensor:
        ctx.save_for_backward(token_ids)
        ctx.table_shape, ctx.padding_id, ctx.handover = table.shape, padding_id, handover
        return F.embedding(token_ids, table)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (token_ids,) = ctx.saved_tensors
        total, ctx.handover.gradient = ctx.handover.gradient, None
        if total is None:
            total = upstream.new_zeros(ctx.table_shape)
        seen, places = token_ids.flatten().unique(return_inverse=True)
        above = upstream.reshape(-1, upstream.shape[-1]).float()
        added = torch.ops.aten.embedding_dense_backward(above, places, len(seen), -1, False)
        if ctx.padding_id is not None:
            added[seen == ctx.padding_id] = 0.0
        total[seen] = (total[seen].float() + added).to(total.dtype)
        return total, None, None, None


class TiedLookup:
    """Takes the place of an embedding's forward."""

    def __init__(self, embedding: nn.Embedding) -> None:
        self._embedding = embedding
        self._handover: Handover | None = None
        embedding.forward = self._forward  # type: ignore[method-assign, assignment]

    def _forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedding = self._embedding
        if not torch.is_grad_enabled() or not embedding.weight.requires_grad:
            return F.embedding(token_ids, embedding.weight)
        self._handover = Handover()
        result: torch.Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            embedding.weight, token_ids, embedding.padding_idx, self._handover
        )
        return result

    def take_handover(self) -> Handover | None:
        """That of the forward pass under way; None where its lookup has no backward."""
        handover, self._handover = self._handover, None
        return handover


def tied_lookup(embedding: nn.Module | None, head: nn.Linear) -> TiedLookup | None:
    """In place of a plain lookup in the head's table; one that does more (Gemma scales its rows) stays as it is."""
    if embedding is None or not has_plain_lookup(embedding) or embedding.weight is not head.weight:
        return None
    return TiedLookup(embedding)
