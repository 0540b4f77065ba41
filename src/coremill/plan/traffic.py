"""Bytes a rank exchanges per optimizer step, by engine and wire dtype: sent, or read from memory that ranks share."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.plan.card import ModelCard
from coremill.plan.types import Arrangement
from coremill.plan.wire import LEAST_BUCKET_BYTES, sends_rows

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
        """All of it."""
        return self.gather_bytes + self.reduce_bytes

    @property
    def wire_bytes(self) -> int:
        """What is sent."""
        return 0 if self.through_memory else self.total

    @property
    def shared_bytes(self) -> int:
        """What is read from memory that ranks share."""
        return self.total if self.through_memory else 0


def traffic_of(card: ModelCard, arrangement: Arrangement) -> Traffic:
    """Bytes by kind of collective; none for a single rank."""
    ranks = arrangement.world_size
    if ranks == 1:
        return Traffic(gather_bytes=0, reduce_bytes=0)
    if arrangement.engine == "replicate":
        return _replicated(card, arrangement)
    reduced = reduced_parameters(card, arrangement)
    leaving = arrangement.compute_bytes * reduced if arrangement.through_memory else arrangement.sent_bytes(reduced)
    gathered = arrangement.gather_bytes * gathered_parameters(card, arrangement)
    if fetched_parameters(card, arrangement):
        gathered += arrangement.accumulation_steps * card.vocabulary_rows  # a byte a row: whether it is needed
    return Traffic(
        gather_bytes=(ranks - 1) * gathered // ranks,
        reduce_bytes=(ranks - 1) * leaving // ranks,
        through_memory=arrangement.through_memory,
    )


def _replicated(card: ModelCard, arrangement: Arrangement) -> Traffic:
    """An exchange of pieces and a gather of their sums, or of two ranks all at once: both send 2 (N-1)/N."""
    ranks, summed, asked_bytes = arrangement.world_size, card.parameters, 0
    if (rows := summed_rows(card, arrangement)) is not None:
        summed += rows * card.hidden - looked_up_parameters(card)
        asked_bytes = card.vocabulary_rows  # a byte a row: whether it is named
    reduced = 2 * (ranks - 1) * arrangement.sent_bytes(summed) // ranks
    return Traffic(gather_bytes=0, reduce_bytes=reduced + (ranks - 1) * asked_bytes)


def summed_rows(card: ModelCard, arrangement: Arrangement) -> int | None:
    """Of a lookup table whose gradient replicate sums apart (named_rows.py); None where it does not."""
    apart = arrangement.engine == "replicate" and arrangement.world_size > 1
    if not apart or 4 * looked_up_parameters(card) < LEAST_BUCKET_BYTES:
        return None
    tokens = arrangement.world_size * arrangement.accumulation_steps * arrangement.tokens_per_forward
    named = _named_rows(card, tokens)
    return named if sends_rows(named, card.vocabulary_rows) else card.vocabulary_rows


def gathered_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Weights gathered in one step: forward needs all; backward the layers again, but no lookup table and no head.

    Through memory: weights of others that are new after an update."""
    fetched = arrangement.accumulation_steps * fetched_parameters(card, arrangement)
    whole = card.parameters - table_parameters(card, arrangement)
    if arrangement.keep_gathered or arrangement.through_memory:
        return whole + fetched
    again = sum(card.layer_parameters) + card.rest_parameters
    if not card.block.plain_logits:
        again += card.embedding_parameters if card.tied else card.head_parameters
    return arrangement.accumulation_steps * (whole + again) + fetched


def reduced_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Gradients reduced in one step: after each micro-batch, or once where they wait whole."""
    whole = card.parameters - table_parameters(card, arrangement)
    fetched = arrangement.accumulation_steps * fetched_parameters(card, arrangement)
    return whole * (1 if arrangement.keep_gathered else arrangement.accumulation_steps) + fetched


def table_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Of a lookup table that is never whole on a rank (engines/shard/rows.py); 0 where it is a group like others."""
    fetches = arrangement.engine == "shard" and arrangement.world_size > 1 and not arrangement.through_memory
    return looked_up_parameters(card) if fetches else 0


def looked_up_parameters(card: ModelCard) -> int:
    """Of a lookup table that is nothing else; the rest of an embedding are learned positions."""
    if card.tied or not card.block.plain_lookup:
        return 0
    return min(card.embedding_parameters, card.vocabulary_rows * card.hidden)


def fetched_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Of such a table's rows, those of a micro-batch."""
    if not table_parameters(card, arrangement):
        return 0
    return _named_rows(card, arrangement.tokens_per_forward) * card.hidden


def _named_rows(card: ModelCard, tokens: int) -> int:
    """How many rows of a table so many tokens name."""
    return int(min(DISTINCT_TOKENS * tokens**DISTINCT_TOKENS_POWER, tokens, card.vocabulary_rows))
