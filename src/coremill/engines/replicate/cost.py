"""What replicate costs: the whole model on every rank, gradients summed a bucket at a time. Torch-free; the engine cuts
and sends by the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from coremill.engines.one_host.cost import OneHostCost, shares_memory
from coremill.engines.optimizers.cost import COSTS, GRADIENT_BYTES
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


class ReplicateOnOneHostCost(OneHostCost):
    """One copy of the model for all ranks of a host."""

    holds_whole_model = True

    def step_points(
        self, card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool
    ) -> Iterator[StepPoint]:
        yield from super().step_points(card, arrangement, linear_copies_weight=linear_copies_weight)
        if card.experts:
            # An expert that no token was sent to keeps its layer's gradients, and all that follow, to the end.
            yield StepPoint(
                name="end of backward",
                gradients=arrangement.compute_bytes * card.trainable_parameters,
                activations=one_layer_bytes(card, arrangement),
                shared=self.between_steps(card, arrangement).shared,
            )

    def reason(self, choice: AutoChoice) -> str:
        ranks = choice.arrangement.ranks_per_node
        return f"its {ranks} ranks compute with one copy of the weights; each moves its share of them"


ON_ONE_HOST = ReplicateOnOneHostCost()


class ReplicateCost(EngineCost):
    tried_by_auto = True
    updates = ("after", "inside")

    def form(self, arrangement: Arrangement) -> EngineCost:
        return ON_ONE_HOST if shares_memory(arrangement) else self

    def state(self, card: ModelCard, arrangement: Arrangement) -> StateBytes:
        """Weights as the optimizer has them; where these are masters in fp32, in bf16 a copy to compute with beside
        them. Of a base, which lies once on a host (engines/held_base.py), the rows that this rank fills."""
        cost = COSTS[arrangement.optimizer]
        base = ceil(base_bytes(card, arrangement) / arrangement.ranks_per_node)
        weight = cost.weight_bytes(arrangement) + cost.copy_bytes(arrangement)
        return StateBytes(
            parameters=weight * card.own_parameters + base,
            gradients=0 if arrangement.update == "inside" else GRADIENT_BYTES * card.trainable_parameters,
            optimizer=cost.held_bytes(card, card.trainable_parameters, arrangement),
            base=base,
        )

    def saved_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        return COSTS[arrangement.optimizer].saved_bytes(card, arrangement)

    def step_points(
        self, card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool
    ) -> Iterator[StepPoint]:
        loss = LossBytes.of(card, arrangement, linear_copies_weight=linear_copies_weight)
        whole = self.state(card, arrangement).gradients
        kept, backward = kept_bytes(card, arrangement), backward_bytes(card, arrangement)
        buffers = _exchange_buffers(card, arrangement)
        if arrangement.update == "inside":
            yield from _inside_points(card, arrangement, loss, kept + backward)
            return
        # Gradients are dropped after each update, but for those of masters, which stay allocated. Those of bf16 weights
        # and of several passes are added to sums in fp32.
        has_copy = COSTS[arrangement.optimizer].copy_bytes(arrangement) > 0
        lasting = has_copy or arrangement.accumulation_steps > 1
        added = arrangement.dtype == "bf16" or arrangement.accumulation_steps > 1
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
        elif (added or card.tied) and not card.has_one_table_gradient:
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
        cost = COSTS[arrangement.optimizer]
        has_copy = cost.copy_bytes(arrangement) > 0
        return cost.seconds(card.trainable_parameters, arrangement, fleet, has_copy=has_copy)

    def reason(self, choice: AutoChoice) -> str:
        state, limit = size(choice.whole_model.total), size(choice.limit_bytes)
        if choice.whole_model.base:
            model = size(choice.whole_model.base * choice.arrangement.ranks_per_node)
            adapters = size(choice.whole_model.total - choice.whole_model.base)
            return (
                f"the model, {model}, lies once on each machine and stays as it is; adapters with gradients and"
                f" moments, {adapters}, are whole on every rank, and only their gradients are exchanged"
            )
        gradients = "" if choice.arrangement.update == "inside" else "gradients and "
        return f"the whole model with {gradients}moments, {state}, fits into the {limit} of a rank"


def _inside_points(card: ModelCard, arrangement: Arrangement, loss: LossBytes, in_backward: int) -> Iterator[StepPoint]:
    """Each gradient is freed once its weight has moved: of one pass a tensor at a time stands, and a copy in fp32 for a
    master; with peers the sums that are on their way. Those of several passes wait for the last one's backward, in one
    process as they are made."""
    compute, kept = arrangement.compute_bytes, kept_bytes(card, arrangement)
    buffers = _exchange_buffers(card, arrangement)
    has_peers, has_copy = arrangement.world_size > 1, COSTS[arrangement.optimizer].copy_bytes(arrangement) > 0
    made = compute + (GRADIENT_BYTES if has_copy or (has_peers and compute < GRADIENT_BYTES) else 0)
    summed = GRADIENT_BYTES if has_peers else compute
    standing = summed * card.trainable_parameters if arrangement.accumulation_steps > 1 else 0
    on_its_way = summed * _parameters_on_their_way(card, arrangement)
    tensor = made * min(card.largest_trainable_layer_parameters, card.hidden * card.intermediate)
    head = made * card.vocabulary_rows * card.hidden if card.trains_the_head and arrangement.vocabulary_logits else 0
    yield loss.point(gradients=standing, activations=kept, buffers=buffers)
    if head and not card.tied:
        yield StepPoint(name="the head moves", gradients=max(standing, head), activations=kept, buffers=buffers)
    yield StepPoint(
        name="backward of the last layer",
        # Of a tied table the head's part waits for the lookup's; with peers it is on its way.
        gradients=standing + max(tensor, on_its_way) + (loss.head_gradient_made if card.tied or has_peers else 0),
        activations=in_backward,
        buffers=buffers,
    )
    lookups = 2 if card.tied and not card.has_one_table_gradient else 1
    yield StepPoint(
        name="end of backward",
        gradients=max(lookups * made * card.trainable_embedding_parameters, tensor, on_its_way),
        activations=one_layer_bytes(card, arrangement),
        buffers=buffers,
    )


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
    layers = min(in_layers, _parameters_on_their_way(card, arrangement))
    # Ends larger than a bucket have one of their own; equal ones share a buffer, as they leave at opposite ends.
    lone = max((end for end in ends if 4 * end > bucket_bytes), default=0)
    return int(2 * arrangement.sent_bytes(lone + layers) * POOL_ROUNDING)


def _parameters_on_their_way(card: ModelCard, arrangement: Arrangement) -> int:
    """Of layers, in the buckets that are under way at once."""
    if arrangement.world_size == 1:
        return 0
    bucket_bytes = 2**20 * bucket_mib(arrangement.compute_bytes * card.trainable_parameters)
    bucket = max(bucket_bytes // arrangement.compute_bytes, card.largest_trainable_layer_parameters // 2)
    return most_buckets_in_flight(2 * arrangement.sent_bytes(bucket)) * bucket


def _summed_rows(card: ModelCard, arrangement: Arrangement) -> int | None:
    """Of a lookup table whose gradient is summed apart (named_rows.py); None where it is not."""
    if not card.trainable_embedding_parameters:
        return None
    if arrangement.world_size == 1 or 4 * looked_up_parameters(card) < LEAST_BUCKET_BYTES:
        return None
    tokens = arrangement.world_size * arrangement.accumulation_steps * arrangement.tokens_per_forward
    named = named_rows(card, tokens)
    return named if sends_rows(named, card.vocabulary_rows) else card.vocabulary_rows
