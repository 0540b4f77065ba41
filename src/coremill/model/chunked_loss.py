"""The loss of next-token prediction: one definition, and a form of it that never holds all logits.

The loss of a step is the sum of cross-entropies over the valid targets of the global batch, divided by their number, so
it is the same number however the batch is split over ranks and accumulation steps. Callers pass `scale` = 1 / that
number.

A Llama-3 head turns 4096 hidden rows into 2.1 GB of fp32 logits. `HeadLoss` goes through the rows in chunks instead and
computes the gradients of hidden states and weight on the way (three products per chunk, none repeated in backward), in
the compute dtype with fp32 softmax: `F.linear_cross_entropy` of torch 2.13 would run all three in fp32 on CPUs.
Probabilities are made a few rows at a time, in cache, and their gradient takes the place of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from coremill.data.packed_batches import IGNORED
from coremill.model.heap import give_back_freed
from coremill.model.tied_lookup import Handover, TiedLookup
from coremill.plan.logits import block_rows_for, chunk_rows_for


def shifted_targets(labels: torch.Tensor) -> torch.Tensor:
    """Targets for each position: the next token's label, nothing for the last one. [rows, length] -> [rows * length]"""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets.view(-1)


def logits_loss(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    """The same loss from whole logits, for models that change their logits after the head."""
    flat = logits.float().view(-1, logits.shape[-1])
    return F.cross_entropy(flat, shifted_targets(labels), ignore_index=IGNORED, reduction="sum") * scale


class _ChunkedLoss(torch.autograd.Function):
    """Linear + cross-entropy over chunks of rows; gradients are made in forward and handed out in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        handover: Handover | None,
    ) -> torch.Tensor:
        rows = hidden.shape[0]
        vocabulary, width = weight.shape
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        chunk_rows = chunk_rows_for(rows, vocabulary, width, weight.element_size(), trains_weight=wants_weight)
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        # A sum over several chunks is kept in fp32: bf16 would round once per chunk.
        accumulate_dtype = weight.dtype if rows <= chunk_rows else torch.float32
        if wants_weight:
            give_back_freed(weight.numel() * accumulate_dtype.itemsize)
        weight_gradient = torch.zeros_like(weight, dtype=accumulate_dtype) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        loss = torch.zeros((), dtype=torch.float64)
        for start in range(0, rows, chunk_rows):
            part = hidden[start : start + chunk_rows]
            part_targets = targets[start : start + chunk_rows]
            logits = F.linear(part, weight, bias)
            loss += _turn_into_gradient(logits, part_targets, scale, bias_gradient)
            if hidden_gradient is not None:
                torch.mm(logits, weight, out=hidden_gradient[start : start + chunk_rows])
            if weight_gradient is not None:
                if weight_gradient.dtype == logits.dtype:
                    weight_gradient.addmm_(logits.t(), part)
                else:
                    weight_gradient += torch.mm(logits.t(), part)
            del logits  # gone before the next chunk's are made, or two chunks would be there at once
        ctx.gradients = (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(weight.dtype),
        )
        ctx.handover = handover
        return (loss * scale).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        factor = float(upstream)
        if factor != 1.0:
            gradients = tuple(None if gradient is None else gradient.mul_(factor) for gradient in gradients)
        hidden_gradient, weight_gradient, bias_gradient = gradients
        if ctx.handover is not None:
            ctx.handover.gradient, weight_gradient = weight_gradient, None
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def _turn_into_gradient(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, bias_gradient: torch.Tensor | None
) -> torch.Tensor:
    """The sum of cross-entropies; where there were logits, there is then their scaled gradient."""
    block_rows = min(block_rows_for(logits.shape[1], torch.get_num_threads()), logits.shape[0])
    work = torch.empty(block_rows, logits.shape[1], dtype=torch.float32)
    loss = torch.zeros((), dtype=torch.float64)
    for block, block_targets in zip(logits.split(block_rows), targets.split(block_rows), strict=True):
        valid = block_targets != IGNORED
        column = block_targets.masked_fill(~valid, 0).unsqueeze(1)
        chosen = block.gather(1, column).squeeze(1).float()
        largest = block.amax(1).float()
        probabilities = torch.softmax(block, dim=1, dtype=torch.float32, out=work[: block.shape[0]])
        # The largest probability is exp(largest logit - log of the sum), and never so small that its logarithm is off.
        log_sum = largest - probabilities.amax(1).log_()
        loss += torch.where(valid, log_sum - chosen, 0.0).sum(dtype=torch.float64)
        row_scale = valid.to(torch.float32).mul_(scale).unsqueeze(1)
        probabilities.mul_(row_scale).scatter_add_(1, column, -row_scale)
        if bias_gradient is not None:
            bias_gradient += probabilities.sum(0)
        block.copy_(probabilities)
    return loss


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scale: float,
    handover: Handover | None = None,
) -> torch.Tensor:
    """Scaled sum of cross-entropies of `hidden @ weight.T + bias`; hidden is [rows, width], targets are [rows].

    With a handover the weight's gradient goes there instead of to autograd."""
    if not torch.is_grad_enabled():
        # Told that inputs require gradients, it would make them in an evaluation too.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: torch.Tensor = _ChunkedLoss.apply(hidden, weight, bias, targets, scale, handover)  # type: ignore[no-untyped-call]
    return loss


class HeadLoss:
    """Takes the place of a head's forward: while a target is set it returns the loss, otherwise the logits.

    Under FSDP2 only the head's own forward sees its whole weight, so the loss must be computed right there.
    """

    def __init__(self, head: nn.Linear, lookup: TiedLookup | None = None, *, only_learned: bool = False) -> None:
        """`only_learned`: no logits are made where nothing is learned, for rows of which most is not."""
        self._head, self._only_learned = head, only_learned
        self._lookup = lookup  # in the head's own table
        self._targets: torch.Tensor | None = None
        self._scale = 1.0
        head.forward = self._forward  # type: ignore[method-assign, assignment]

    def expect(self, labels: torch.Tensor, scale: float) -> None:
        """The next call of the head returns the loss against these labels."""
        self._targets = shifted_targets(labels)
        self._scale = scale

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._targets is None:
            return F.linear(hidden, self._head.weight, self._head.bias)
        targets, self._targets = self._targets, None
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self._only_learned:
            learned = targets != IGNORED
            learned[:1] |= not bool(learned.any())  # of fillers one, without a target: the pass is made all the same
            flat, targets = flat[learned], targets[learned]
        handover = self._lookup.take_handover() if self._lookup else None
        return chunked_loss(flat, self._head.weight, self._head.bias, targets, self._scale, handover)
