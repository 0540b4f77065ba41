"""The points of a step at which a rank may hold most, each as the sum of what is alive then, and what the loss adds.

Engines list their points (engines/*/cost.py), written down from the allocations of real steps (torch's memory profiler,
every engine, 1 and 2 ranks): what they hold, when they let go, and what runs side by side. Weights and the optimizer's
state stand all the time and are left out here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from coremill.plan.card import ModelCard
from coremill.plan.families import FP32_HEADS
from coremill.plan.logits import WHOLE_LOGIT_BYTES, block_rows_for, chunk_rows_for
from coremill.plan.types import Arrangement


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """What is alive at one point of a step, besides weights and the optimizer's state."""

    name: str
    gradients: int
    activations: int = 0
    logits: int = 0
    whole_logits: bool = False  # of all tokens, in a few large blocks
    buffers: int = 0
    shared: int = 0  # what is resident of memory that ranks of one host share

    @property
    def heap(self) -> int:
        """What comes and goes there, and leaves holes."""
        return self.gradients + self.activations + self.logits + self.buffers


def possible_peaks(points: Iterable[StepPoint]) -> list[StepPoint]:
    """Ranks keep what they free: the heap stays as large as it ever was, and stands beside the most that is resident of
    shared memory, even if that is at another point."""
    known = list(points)
    shared = max(point.shared for point in known)
    return [replace(point, shared=shared) for point in known]


@dataclass(frozen=True)
class LossBytes:
    """What the loss adds to a forward pass."""

    chunk: int  # logits, and what is made of them
    head_gradient: int  # made in forward, handed out in backward; 0 where it is made of whole logits in backward
    head_gradient_made: int  # the same, when backward has passed the head
    is_whole: bool = False

    @staticmethod
    def of(card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool) -> LossBytes:
        """Logits a chunk at a time, or all at once where the model does something to them."""
        if not arrangement.vocabulary_logits:
            return LossBytes(0, 0, 0)
        tokens, vocabulary = arrangement.tokens_per_forward, card.vocabulary_rows
        compute = 4 if fp32_head_parameters(card, arrangement) else arrangement.compute_bytes
        head = vocabulary * card.hidden
        if not card.block.plain_logits:
            per_logit = WHOLE_LOGIT_BYTES + (compute if card.block.capped_logits else 0)
            made = compute * head if card.trains_the_head else 0
            return LossBytes(tokens * vocabulary * per_logit, 0, made, is_whole=True)
        rows = chunk_rows_for(tokens, vocabulary, card.hidden, compute, trains_weight=card.trains_the_head)
        block_rows = min(rows, block_rows_for(vocabulary, arrangement.threads_per_rank))
        probabilities = 4 * block_rows * vocabulary
        turned_weight = compute * head if linear_copies_weight else 0
        chunk = compute * rows * vocabulary + max(probabilities, turned_weight)
        if not card.trains_the_head:
            return LossBytes(chunk, 0, 0)
        if compute == 2 and rows < tokens:
            # Summed in fp32 over chunks, each made in bf16.
            return LossBytes(chunk + compute * head, 4 * head, 4 * head)
        return LossBytes(chunk, compute * head, compute * head)

    def point(self, *, gradients: int, activations: int, buffers: int = 0, shared: int = 0) -> StepPoint:
        """The loss, with what else stands then; its gradient of the head is added."""
        return StepPoint(
            name="loss",
            gradients=gradients + self.head_gradient,
            activations=activations,
            logits=self.chunk,
            whole_logits=self.is_whole,
            buffers=buffers,
            shared=shared,
        )


def fp32_head_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Parameters of a head that stays in fp32 while the rest is rounded to bf16; 0: there is none."""
    keeps = card.family in FP32_HEADS and not card.tied and arrangement.dtype == "bf16"
    return card.head_parameters if keeps else 0
