"""The moments of a step at which a rank may hold most, each as the sum of what is alive then.

Written down from the allocations of real steps (torch's memory profiler, every engine, 1 and 2 ranks): what the engines
hold, when they let go, and what runs side by side. Weights and moments of the optimizer stand all the time and are left
out here. The names follow one backward pass: the loss is first, the lookup table last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from coremill.plan.activations import backward_bytes, kept_bytes, one_layer_bytes
from coremill.plan.card import ModelCard
from coremill.plan.logits import block_rows_for, chunk_rows_for
from coremill.plan.traffic import fetched_parameters, table_parameters
from coremill.plan.types import Arrangement
from coremill.plan.wire import LEAST_IN_FLIGHT, PASSED_AT_ONCE_NUMEL, ROOM_IN_FLIGHT_BYTES, bucket_mib

# Numbers of parallel/: exchanges of DDP's buckets in flight.
REPLICATE_EXCHANGES_IN_FLIGHT = 3
WHOLE_UP_TO_NUMEL = 2**26  # larger embeddings and heads leave in pieces
PIECE_NUMEL = 2**24
SLOTS_IN_TURN = 2  # of memory that ranks of one host share, for each size
# Sizes of pooled buffers are rounded up by an eighth at most, by a sixteenth on average.
POOL_ROUNDING = 17 / 16


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is alive at one moment, besides weights and the optimizer's moments."""

    name: str
    gradients: int
    activations: int = 0
    logits: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.gradients + self.activations + self.logits + self.buffers


def share(parameters: int, arrangement: Arrangement) -> int:
    """Parameters of a rank: all of them, or its N-th part rounded up."""
    return parameters if arrangement.engine == "replicate" else ceil(parameters / arrangement.world_size)


def moments_of_step(card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool) -> list[Moment]:
    """The candidates for a step's peak."""
    loss = _Loss.of(card, arrangement, linear_copies_weight)
    made = _replicate if arrangement.engine == "replicate" else _shard
    return list(made(card, arrangement, loss))


@dataclass(frozen=True)
class _Loss:
    """What the loss adds to a forward pass."""

    chunk: int  # logits, and what is made of them
    head_gradient: int  # made in forward, handed out in backward; 0 where the model's own loss runs

    @staticmethod
    def of(card: ModelCard, arrangement: Arrangement, linear_copies_weight: bool) -> _Loss:
        tokens, vocabulary, compute = arrangement.tokens_per_forward, card.vocabulary_rows, arrangement.compute_bytes
        head = vocabulary * card.hidden
        if not card.block.plain_logits:
            # The model's own loss: logits, the capped ones, fp32 copy, log-probabilities and their gradient.
            return _Loss(tokens * vocabulary * (2 * compute + 3 * 4), 0)
        rows = chunk_rows_for(tokens, vocabulary, card.hidden, compute)
        block_rows = min(rows, block_rows_for(vocabulary, arrangement.threads_per_rank))
        probabilities = 4 * block_rows * vocabulary
        turned_weight = compute * head if linear_copies_weight else 0
        chunk = compute * rows * vocabulary + max(probabilities, turned_weight)
        if compute == 2 and rows < tokens:
            # Summed in fp32 over chunks, each made in bf16.
            return _Loss(chunk + compute * head, 4 * head)
        return _Loss(chunk, compute * head)


def gradient_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Gradients once backward is through."""
    own = 4 * share(card.parameters, arrangement)
    if arrangement.engine == "replicate" and arrangement.dtype == "bf16" and arrangement.world_size > 1:
        # fp32 sums beside DDP's bf16 buckets.
        return own + 2 * card.parameters
    return own


# -- replicate


def _replicate(card: ModelCard, arrangement: Arrangement, loss: _Loss) -> Iterator[Moment]:
    whole = gradient_bytes(card, arrangement)
    kept, backward = kept_bytes(card, arrangement), backward_bytes(card, arrangement)
    buffers = pooled(card, arrangement)
    # One fp32 rank drops its gradients after each update; otherwise buckets or fp32 sums stay allocated.
    lasting = arrangement.world_size > 1 or arrangement.dtype == "bf16" or arrangement.accumulation_steps > 1
    standing = whole if lasting else 0
    yield Moment(
        name="loss", gradients=standing + loss.head_gradient, activations=kept, logits=loss.chunk, buffers=buffers
    )
    yield Moment(
        name="backward of the last layer",
        gradients=standing + (0 if lasting else loss.head_gradient),
        activations=kept + backward,
        buffers=buffers,
    )
    totals = 0
    if arrangement.dtype == "bf16" and arrangement.world_size > 1:
        totals = 4 * card.parameters  # fp32 sums of all buckets, until the last one has arrived
    makes_lookup = (lasting or card.tied) and not card.has_one_table_gradient
    lookup = arrangement.compute_bytes * card.embedding_parameters if makes_lookup else 0
    yield Moment(
        name="end of backward",
        gradients=whole,
        activations=max(lookup, one_layer_bytes(card, arrangement)),
        buffers=buffers + totals,
    )


def _exchanges(card: ModelCard, arrangement: Arrangement) -> int:
    """Send and receive buffers of the buckets in flight; gloo's ring works in place."""
    if arrangement.world_size == 1 or arrangement.gradients_go_around:
        return 0
    ends = [card.embedding_parameters] if card.tied else [card.embedding_parameters, card.head_parameters]
    in_layers = card.parameters - sum(ends)
    bucket_bytes = 2**20 * bucket_mib(arrangement.compute_bytes * card.parameters)
    bucket = max(bucket_bytes // arrangement.compute_bytes, card.largest_layer_parameters // 2)
    layers = min(in_layers, REPLICATE_EXCHANGES_IN_FLIGHT * bucket)
    # Ends larger than a bucket have one of their own; equal ones share a buffer, as they leave at opposite ends.
    lone = max((end for end in ends if 4 * end > bucket_bytes), default=0)
    return int(2 * arrangement.sent_bytes(lone + layers) * POOL_ROUNDING)


# -- shard


def pooled(card: ModelCard, arrangement: Arrangement) -> int:
    """Buffers that are there from the first step on, used again by every layer."""
    if arrangement.world_size == 1:
        return 0
    if arrangement.engine == "replicate":
        return _exchanges(card, arrangement)
    layer = card.largest_layer_parameters
    if arrangement.through_memory:
        ends = [card.embedding_parameters] if card.tied else [card.embedding_parameters, card.head_parameters]
        lasting = [layer, *(end for end in ends if end <= layer)]
        # Resident at the moments that need most: what this rank fills, a part of a gather or the layout of a reduction.
        pages_per_parameter = SLOTS_IN_TURN * (1 / arrangement.world_size + 1)
        pieces = 2 * SLOTS_IN_TURN * PASSED_AT_ONCE_NUMEL if max(ends) > layer else 0
        return int(arrangement.compute_bytes * (sum(lasting) * pages_per_parameter + pieces))
    # What others sent; and what is sent to them: the gradients as laid out, or from a place of its own.
    from_others = 1 - 1 / arrangement.world_size
    places = from_others + (1 if _is_sent_as_laid_out(arrangement) else from_others)
    reduction = arrangement.sent_bytes(layer) * places
    in_flight = min(max(LEAST_IN_FLIGHT, int(ROOM_IN_FLIGHT_BYTES // reduction)), card.layers)
    return int(reduction * in_flight * POOL_ROUNDING)


def _shard(card: ModelCard, arrangement: Arrangement, loss: _Loss) -> Iterator[Moment]:
    compute = arrangement.compute_bytes
    kept, backward = kept_bytes(card, arrangement), backward_bytes(card, arrangement)
    layer, lookup = card.largest_layer_parameters, card.embedding_parameters
    head = lookup if card.tied else card.head_parameters
    keep, pool = arrangement.keep_gathered, pooled(card, arrangement)
    own_head, own_all = 4 * share(head, arrangement), 4 * share(card.parameters, arrangement)
    earlier = 0
    wait_whole = keep and not arrangement.through_memory
    if arrangement.accumulation_steps > 1:
        # Of earlier micro-batches: this rank's sums, or whole gradients where nothing is sent before the last one.
        earlier = 4 * card.parameters if wait_whole else own_all
    table, fetched = table_parameters(card, arrangement), fetched_parameters(card, arrangement)
    gathered = compute * (card.parameters - table)
    # A group on its way needs its place, gloo's flat copy of it, and the group in use beside it. Through memory it is
    # in the pool until it is in use.
    on_its_way = 0 if keep or arrangement.through_memory else compute * 2 * layer
    # Of the pool what the others filled is resident as well, except before the loss and before the table's gradient.
    others_filled = 0
    if arrangement.through_memory:
        others_filled = int(SLOTS_IN_TURN * 2 * (1 - 1 / arrangement.world_size) * compute * layer)
    while_gathering = compute * (head if arrangement.through_memory else layer + head)

    yield Moment(
        name="gathering the head",
        gradients=earlier,
        activations=kept,
        buffers=pool + (gathered + compute * head if keep else compute * head + while_gathering),
    )
    yield Moment(
        name="loss",
        gradients=earlier + loss.head_gradient,
        activations=kept,
        logits=loss.chunk,
        buffers=pool + (gathered if keep else compute * head),
    )
    # Tied weights leave last, with the lookup table's gradient.
    leaving = _leaving(head, layer, arrangement)
    still_gathered = gathered - compute * head if keep else 0
    if not card.tied:
        yield Moment(
            name="the head's gradient leaves",
            gradients=earlier + compute * head + own_head,
            activations=kept,
            buffers=pool + leaving + still_gathered + on_its_way,
        )
    yield Moment(
        name="backward of the last layer",
        gradients=earlier + compute * layer + (compute * head if card.tied else own_head),
        activations=kept + backward,
        buffers=pool
        + others_filled
        + (0 if card.tied or arrangement.through_memory else leaving)
        + (still_gathered if keep else on_its_way + compute * layer)
        + (compute * head if card.tied and keep else 0),
    )
    last_activations = arrangement.tokens_per_forward * compute * card.hidden
    if table:
        # The gradient above the lookup in fp32, that of its rows, what is sent and received of it.
        above = arrangement.tokens_per_forward * 4 * card.hidden
        yield Moment(
            name="the lookup table's gradient leaves",
            gradients=(0 if wait_whole else earlier) + own_all + 4 * fetched,
            activations=last_activations + above,
            buffers=pool + 2 * arrangement.sent_bytes(fetched),
        )
        return
    table_gradients = 2 if card.tied and not card.has_one_table_gradient else 1
    yield Moment(
        name="the lookup table's gradient leaves",
        gradients=(0 if wait_whole else earlier) + own_all + compute * lookup * table_gradients,
        activations=last_activations,
        buffers=pool + _leaving(lookup, layer, arrangement),
    )


def _leaving(parameters: int, layer: int, arrangement: Arrangement) -> int:
    """A gradient laid out, and what is sent and received of it: all, or two pieces where it is large.

    Through memory: laid out as computed, and read by the others from there."""
    if arrangement.through_memory:
        return arrangement.compute_bytes * parameters if parameters > layer else 0
    whole = parameters <= max(layer, WHOLE_UP_TO_NUMEL)
    sent = arrangement.sent_bytes(parameters if whole else LEAST_IN_FLIGHT * PIECE_NUMEL)
    from_others = sent * (arrangement.world_size - 1) // arrangement.world_size
    if _is_sent_as_laid_out(arrangement):
        return arrangement.sent_bytes(parameters) + from_others
    return 4 * parameters + 2 * from_others


def _is_sent_as_laid_out(arrangement: Arrangement) -> bool:
    """Gradients are laid out in fp32, or as computed where that is how they travel."""
    return arrangement.gradient_form == "fp32" or arrangement.dtype == "bf16"
