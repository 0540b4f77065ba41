"""Bytes a rank exchanges per optimizer step: sent, or read from memory that ranks share; the form in which gradients
travel, by which engines send and the plan counts; and how many rows of a lookup table that is nothing else its tokens
name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coremill.plan.card import ModelCard

GradientForm = Literal["fp32", "bf16", "sqrt16"]

# Gradients that share one scale when they travel as sqrt16 (engines/wire/codec.py).
SCALE_BLOCK = 1024
_SCALE_BYTES = 4

# Different tokens among so many: 306 of 1024, 847 of 4096, 1918 of 16384 in rows of the built-in corpus with a
# vocabulary of 4096.
DISTINCT_TOKENS = 2.2
DISTINCT_TOKENS_POWER = 0.71


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank sends in one step, or reads where ranks share memory."""

    gather_bytes: int  # weights, around a ring
    reduce_bytes: int  # gradients, to all peers at once
    through_memory: bool = False

    @property
    def total(self) -> int:
        return self.gather_bytes + self.reduce_bytes

    @property
    def wire_bytes(self) -> int:
        return 0 if self.through_memory else self.total

    @property
    def shared_bytes(self) -> int:
        """What is read from memory that ranks share."""
        return self.total if self.through_memory else 0


def looked_up_parameters(card: ModelCard) -> int:
    """Parameters of a lookup table that is not the head too; the rest of an embedding are learned positions."""
    if card.tied or not card.block.plain_lookup:
        return 0
    return min(card.embedding_parameters, card.vocabulary_rows * card.lookup_width)


def named_rows(card: ModelCard, tokens: int) -> int:
    """How many rows of a table this many tokens name."""
    return int(min(DISTINCT_TOKENS * tokens**DISTINCT_TOKENS_POWER, tokens, card.vocabulary_rows))


def gradient_form(wire_dtype: str, dtype: str) -> GradientForm:
    """Exact, bf16, or sqrt16: also 16 bits, but finer, for arithmetic that is itself finer than bf16."""
    if wire_dtype == "fp32":
        return "fp32"
    return "sqrt16" if wire_dtype == "auto" and dtype == "fp32" else "bf16"


def sent_bytes(form: GradientForm, gradients: int) -> int:
    if form == "fp32":
        return 4 * gradients
    scales = -(-gradients // SCALE_BLOCK) if form == "sqrt16" else 0
    return 2 * gradients + _SCALE_BYTES * scales
