"""What a plan says of the model: whether its family is known, which attention it gets, how its logits are made."""

from __future__ import annotations

from typing import Literal

from coremill.plan.activations import is_masked, mask_bytes_per_token, masked_layers, uses_flash
from coremill.plan.card import ModelCard
from coremill.plan.families import FAMILIES
from coremill.plan.types import Arrangement, Choice
from coremill.plan.words import plural, size

NOT_FUSED = "off: model.fused is false"


def activations_choice(card: ModelCard) -> Choice[Literal["counted", "estimated"]]:
    """How what layers keep for backward was found."""
    if card.block.norm == "unfused rms" and card.estimated_numbers is None:
        return Choice("estimated", "model.fused is false: as norms and MLPs of most families keep it, rather too much")
    if card.estimated_numbers is None:
        return Choice("counted", f"{card.family} is a known family: tests hold the plan to what its layers keep")
    what = f"{card.family} is a family that the plan does not know"
    if card.family in FAMILIES:
        what = f"the layers of this {card.family} are not all of one kind"
    reason = f"{what}: by the shapes of its weights, each product keeping its input and output, rather too much"
    if card.has_recurrent_layers:
        reason += "; what its recurrent layers keep is not all in it: a run may need much more"
    return Choice("estimated", reason)


def attention_choice(card: ModelCard, arrangement: Arrangement) -> Choice[Literal["sdpa", "eager"]]:
    """Which attention the model gets, and which matrices of tokens by tokens are made for it."""
    rows, length = arrangement.micro_batch_rows, arrangement.sequence_length
    if not uses_flash(card, arrangement):
        matrices = f"every layer keeps {card.heads} x {rows} matrices of {length} x {length}"
        if arrangement.attention == "eager":
            return Choice("eager", f"set by you: {matrices}")
        if card.block.eager_only or card.block.softcap:
            return Choice("eager", f"{card.family} has no sdpa form: {matrices}")
        return Choice("sdpa", f"with dropout of attention, {matrices}")
    if not (masked := masked_layers(card, arrangement)):
        return Choice("sdpa", "no matrix of tokens by tokens is kept")
    kept = size(arrangement.tokens_per_forward * mask_bytes_per_token(card, arrangement))
    window = next((window for window in card.windows if window is not None and is_masked(window, arrangement)), None)
    if arrangement.documents_apart:
        apart = "documents are kept apart"
    elif arrangement.is_padded:
        apart = "rows of different lengths are computed together"
    else:
        apart = f"windows of {window} tokens end inside a row"
    return Choice("sdpa", f"{apart}: {plural(masked, 'layer')} of {card.layers} keep {kept} for a mask each")


def logits_choice(
    card: ModelCard, arrangement: Arrangement, *, fused: bool
) -> Choice[Literal["chunked", "whole", "none"]]:
    """Whether the loss needs all logits at once."""
    if not arrangement.vocabulary_logits:
        return Choice("none", "the task's loss is not made of words")
    if card.block.plain_logits:
        return Choice("chunked", "made and used a chunk at a time")
    what = f"{card.family} {'caps' if card.block.capped_logits else 'scales'} its logits after the head"
    return Choice(
        "whole",
        f"{what if fused else NOT_FUSED}: {arrangement.tokens_per_forward} x {card.vocabulary_rows} of"
        " them at once, with their gradients",
    )
