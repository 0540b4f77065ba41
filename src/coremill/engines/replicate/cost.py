"""What replicate costs: the whole model on every rank, gradients summed a bucket at a time. Torch-free; the engine cuts
and sends by the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from coremill.engines.optimizers.cost import COPY_BYTES, COSTS, WEIGHT_BYTES
from coremill.engines.wire.sizes import LEAST_IN_FLIGHT, POOL_ROUNDING, ROOM_IN_FLIGHT_BYTES
from coremill.hardware.facts import Fleet
from coremill.plan.activations import backward_bytes, kept_bytes, one_layer_bytes
from coremill.plan.card import ModelCard
from coremill.plan.engine_cost import AutoChoice, EngineCost, StateBytes, base_bytes
from coremill.plan.peak import LossBytes, StepPoint
from coremill.plan.traffic import Traffic, looked_up_parameters, named_rows
from coremill.plan.types import Arrangement
from coremill.plan.words import size

# Gradients leave a bucket at a time: large enough to be bandwidth, not latency, small enough that the first leaves
# early in backward and little is left to do when the last one is there.
MOST_BUCKET_MIB = 32
BUCKETS_OF_A_MODEL = 8
# Towards the end of backward they get smaller, down to this: there is less and less left to hide them behind.
LEAST_BUCKET_BYTES = 2**20
# Half a model.
MOST_BUCKETS_IN_FLIGHT = 4


def bucket_mib(gradient_bytes: int) -> int:
    """Of a model with so many bytes of gradients on each rank."""
    return min(MOST_BUCKET_MIB, max(1, gradient_bytes // BUCKETS_OF_A_MODEL // 2**20))


def most_buckets_in_flight(bucket_buffer_bytes: int) -> int:
    """With so many bytes of send and receive buffers each; of three, one may be in its second stage."""
    return max(LEAST_IN_FLIGHT + 1, min(MOST_BUCKETS_IN_FLIGHT, ROOM_IN_FLIGHT_BYTES // max(1, bucket_buffer_bytes)))


def sends_rows(named: int, rows: int) -> bool:
    """Whether of a table with so many rows only those go on the wire that tokens of any rank named: taking them out and
    putting them back costs two copies."""
    return 2 * named <= rows


class ReplicateCost(EngineCost):
    tried_by_auto = True

    def state(self, card: ModelCard, arrangement: Arrangement) -> StateBytes:
        """fp32 weights; in bf16 a copy to compute with beside these masters. Of a base, which lies once on a host
        (engines/held_base.py), the rows that this rank fills."""
        copy = COPY_BYTES if arrangement.dtype == "bf16" else 0
        base = ceil(base_bytes(card, arrangement) / arrangement.ranks_per_node)
        return StateBytes(
            parameters=(WEIGHT_BYTES + copy) * card.own_parameters + base,
            gradients=4 * card.trainable_parameters,
            optimizer=COSTS[arrangement.optimizer].state_bytes * card.trainable_parameters,
            base=base,
        )

    def saved_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        return COSTS[arrangement.optimizer].saved_bytes(card)

    def step_points(
        self, card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool
    ) -> Iterator[StepPoint]:
        loss = LossBytes.of(card, arrangement, linear_copies_weight=linear_copies_weight)
        whole = self.state(card, arrangement).gradients
        kept, backward = kept_bytes(card, arrangement), backward_bytes(card, arrangement)
        buffers = _exchange_buffers(card, arrangement)
        # In fp32 gradients are dropped after each update; in bf16 their fp32 sums stay allocated.
        lasting = arrangement.dtype == "bf16" or arrangement.accumulation_steps > 1
        standing = whole if lasting else 0
        yield loss.point(gradients=standing, activations=kept, buffers=buffers)
        yield StepPoint(
            name="backward of the last layer",
            gradients=standing + (0 if lasting else loss.head_gradient_made),
            activations=kept + backward,
            buffers=buffers,
        )
        if (rows := _summed_rows(card, arrangement)) is not None:
            # The gradient of a lookup alone is sparse; its rows are taken out to be sent, unless all of them are.
            summed = rows * card.lookup_width
            lookup = 2 * arrangement.sent_bytes(summed) + (4 * summed if rows < card.vocabulary_rows else 0)
        elif (lasting or card.tied) and not card.has_one_table_gradient:
            lookup = arrangement.compute_bytes * card.trainable_embedding_parameters
        else:
            lookup = 0
        yield StepPoint(
            name="end of backward",
            gradients=whole,
            activations=max(lookup, one_layer_bytes(card, arrangement)),
            buffers=buffers,
        )

    def between_steps(self, card: ModelCard, arrangement: Arrangement) -> StepPoint:
        return StepPoint(name="between steps", gradients=0, buffers=_exchange_buffers(card, arrangement))

    def traffic(self, card: ModelCard, arrangement: Arrangement) -> Traffic:
        """An exchange of pieces and a gather of their sums, or of two ranks all at once: both send 2 (N-1)/N."""
        ranks, summed, asked_bytes = arrangement.world_size, card.trainable_parameters, 0
        if (rows := _summed_rows(card, arrangement)) is not None:
            summed += rows * card.lookup_width - looked_up_parameters(card)
            asked_bytes = card.vocabulary_rows  # a byte a row: whether it is named
        reduced = 2 * (ranks - 1) * arrangement.sent_bytes(summed) // ranks
        return Traffic(gather_bytes=0, reduce_bytes=reduced + (ranks - 1) * asked_bytes)

    def overlap_seconds(self, arrangement: Arrangement, compute_seconds: float) -> float:
        """The last backward."""
        last = 1.0 / arrangement.accumulation_steps
        return compute_seconds * last * 2 / 3

    def optimizer_seconds(self, card: ModelCard, arrangement: Arrangement, fleet: Fleet) -> float:
        """Of all parameters, on every rank."""
        has_copy = arrangement.dtype == "bf16"
        return COSTS[arrangement.optimizer].seconds(card.trainable_parameters, arrangement, fleet, has_copy=has_copy)

    def reason(self, choice: AutoChoice) -> str:
        state, limit = size(choice.whole_model.total), size(choice.limit_bytes)
        if choice.whole_model.base:
            model = size(choice.whole_model.base * choice.arrangement.ranks_per_node)
            adapters = size(choice.whole_model.total - choice.whole_model.base)
            return (
                f"the model, {model}, lies once on each machine and stays as it is; adapters with gradients and"
                f" moments, {adapters}, are whole on every rank, and only their gradients are exchanged"
            )
        return f"the whole model with gradients and moments, {state}, fits into the {limit} of a rank"


def _exchange_buffers(card: ModelCard, arrangement: Arrangement) -> int:
    """Send and receive buffers of the buckets in flight."""
    if arrangement.world_size == 1:
        return 0
    head = card.trainable_head_parameters
    ends = [card.trainable_embedding_parameters] if card.tied else [card.trainable_embedding_parameters, head]
    in_layers = card.trainable_parameters - sum(ends)
    if _summed_rows(card, arrangement) is not None:
        ends = [head]
    bucket_bytes = 2**20 * bucket_mib(arrangement.compute_bytes * card.trainable_parameters)
    bucket = max(bucket_bytes // arrangement.compute_bytes, card.largest_trainable_layer_parameters // 2)
    layers = min(in_layers, most_buckets_in_flight(2 * arrangement.sent_bytes(bucket)) * bucket)
    # Ends larger than a bucket have one of their own; equal ones share a buffer, as they leave at opposite ends.
    lone = max((end for end in ends if 4 * end > bucket_bytes), default=0)
    return int(2 * arrangement.sent_bytes(lone + layers) * POOL_ROUNDING)


def _summed_rows(card: ModelCard, arrangement: Arrangement) -> int | None:
    """Of a lookup table whose gradient is summed apart (named_rows.py); None where it is not."""
    if not card.trainable_embedding_parameters:
        return None
    if arrangement.world_size == 1 or 4 * looked_up_parameters(card) < LEAST_BUCKET_BYTES:
        return None
    tokens = arrangement.world_size * arrangement.accumulation_steps * arrangement.tokens_per_forward
    named = named_rows(card, tokens)
    return named if sends_rows(named, card.vocabulary_rows) else card.vocabulary_rows
