"""The moments of a step at which a rank may hold most, each as the sum of what is alive then.

Written down from the allocations of real steps (torch's memory profiler, every engine, 1 and 2 ranks): what the engines
hold, when they let go, and what runs side by side. Weights and moments of the optimizer stand all the time and are left
out here. The names follow one backward pass: the loss is first, the lookup table last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from coremill.plan.activations import backward_bytes, kept_bytes, one_layer_bytes
from coremill.plan.card import ModelCard
from coremill.plan.families import FP32_HEADS
from coremill.plan.logits import WHOLE_LOGIT_BYTES, block_rows_for, chunk_rows_for
from coremill.plan.traffic import fetched_parameters, summed_rows, table_parameters
from coremill.plan.types import Arrangement
from coremill.plan.wire import (
    LEAST_IN_FLIGHT,
    PASSED_AT_ONCE_NUMEL,
    RESIDENT_UP_TO_BYTES,
    ROOM_IN_FLIGHT_BYTES,
    bucket_mib,
    most_buckets_in_flight,
)

# Numbers of parallel/.
WHOLE_UP_TO_NUMEL = 2**26  # larger embeddings and heads leave in pieces
PIECE_NUMEL = 2**24
SLOTS_IN_TURN = 2  # of memory that ranks of one host share
# Sizes of pooled buffers are rounded up by an eighth at most, by a sixteenth on average.
POOL_ROUNDING = 17 / 16


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is alive at one moment, besides weights and the optimizer's moments."""

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

    @property
    def total(self) -> int:
        """All of it."""
        return self.heap + self.shared


def share(parameters: int, arrangement: Arrangement) -> int:
    """Parameters of a rank: all of them, or its N-th part rounded up."""
    return parameters if arrangement.engine == "replicate" else ceil(parameters / arrangement.world_size)


def fp32_head(card: ModelCard, arrangement: Arrangement) -> int:
    """Parameters of a head that is not rounded to bf16, and so not sharded either; 0: it is like the rest."""
    keeps = card.family in FP32_HEADS and not card.tied and arrangement.dtype == "bf16"
    return card.head_parameters if keeps else 0


def held_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Of the model, on a rank."""
    whole = fp32_head(card, arrangement)
    return whole + share(card.parameters - whole, arrangement)


def quiet_moment(
    name: str, card: ModelCard, arrangement: Arrangement, *, gradients: int = 0, buffers: int = 0
) -> Moment:
    """Outside of forward and backward: buffers that wait for the next step, and what else is told."""
    pool = pooled(card, arrangement)
    if arrangement.through_memory:
        return Moment(name=name, gradients=gradients, buffers=buffers, shared=pool)
    return Moment(name=name, gradients=gradients, buffers=buffers + pool)


def moments_of_step(card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool) -> list[Moment]:
    """The candidates for a step's peak."""
    loss = _Loss.of(card, arrangement, linear_copies_weight)
    if arrangement.engine == "replicate":
        return list(_replicate(card, arrangement, loss))
    moments = list((_one_host if arrangement.through_memory else _shard)(card, arrangement, loss))
    if whole := fp32_head(card, arrangement):
        # Its gradient and the flat copy that is summed over ranks.
        gradients = gradient_bytes(card, arrangement) + 4 * whole
        moments.append(quiet_moment("the fp32 head's gradient is summed", card, arrangement, gradients=gradients))
    return moments


def fullest(moments: Sequence[Moment]) -> Moment:
    """The peak of a step. Ranks keep what they free: the heap stays as large as it ever was, and stands beside the most
    that is resident of shared memory, even if that is at another moment."""
    largest_heap = max(moments, key=lambda moment: moment.heap)
    return replace(largest_heap, shared=max(moment.shared for moment in moments))


@dataclass(frozen=True)
class _Loss:
    """What the loss adds to a forward pass."""

    chunk: int  # logits, and what is made of them
    head_gradient: int  # made in forward, handed out in backward; 0 where it is made of whole logits in backward
    head_gradient_made: int  # the same, when backward has passed the head
    is_whole: bool = False

    @staticmethod
    def of(card: ModelCard, arrangement: Arrangement, linear_copies_weight: bool) -> _Loss:
        if not arrangement.vocabulary_logits:
            return _Loss(0, 0, 0)
        tokens, vocabulary = arrangement.tokens_per_forward, card.vocabulary_rows
        compute = 4 if fp32_head(card, arrangement) else arrangement.compute_bytes
        head = vocabulary * card.hidden
        if not card.block.plain_logits:
            per_logit = WHOLE_LOGIT_BYTES + (compute if card.block.capped_logits else 0)
            return _Loss(tokens * vocabulary * per_logit, 0, compute * head, is_whole=True)
        rows = chunk_rows_for(tokens, vocabulary, card.hidden, compute)
        block_rows = min(rows, block_rows_for(vocabulary, arrangement.threads_per_rank))
        probabilities = 4 * block_rows * vocabulary
        turned_weight = compute * head if linear_copies_weight else 0
        chunk = compute * rows * vocabulary + max(probabilities, turned_weight)
        if compute == 2 and rows < tokens:
            # Summed in fp32 over chunks, each made in bf16.
            return _Loss(chunk + compute * head, 4 * head, 4 * head)
        return _Loss(chunk, compute * head, compute * head)


def gradient_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Gradients once backward is through."""
    return 4 * held_parameters(card, arrangement)


# -- replicate


def _replicate(card: ModelCard, arrangement: Arrangement, loss: _Loss) -> Iterator[Moment]:
    whole = gradient_bytes(card, arrangement)
    kept, backward = kept_bytes(card, arrangement), backward_bytes(card, arrangement)
    buffers = pooled(card, arrangement)
    # In fp32 gradients are dropped after each update; in bf16 their fp32 sums stay allocated.
    lasting = arrangement.dtype == "bf16" or arrangement.accumulation_steps > 1
    standing = whole if lasting else 0
    yield Moment(
        name="loss",
        gradients=standing + loss.head_gradient,
        activations=kept,
        logits=loss.chunk,
        whole_logits=loss.is_whole,
        buffers=buffers,
    )
    yield Moment(
        name="backward of the last layer",
        gradients=standing + (0 if lasting else loss.head_gradient_made),
        activations=kept + backward,
        buffers=buffers,
    )
    if (rows := summed_rows(card, arrangement)) is not None:
        # The gradient of a lookup alone is sparse; its rows are taken out to be sent, unless all of them are.
        summed = rows * card.hidden
        lookup = 2 * arrangement.sent_bytes(summed) + (4 * summed if rows < card.vocabulary_rows else 0)
    elif (lasting or card.tied) and not card.has_one_table_gradient:
        lookup = arrangement.compute_bytes * card.embedding_parameters
    else:
        lookup = 0
    yield Moment(
        name="end of backward",
        gradients=whole,
        activations=max(lookup, one_layer_bytes(card, arrangement)),
        buffers=buffers,
    )


def _exchanges(card: ModelCard, arrangement: Arrangement) -> int:
    """Send and receive buffers of the buckets in flight."""
    if arrangement.world_size == 1:
        return 0
    ends = [card.embedding_parameters] if card.tied else [card.embedding_parameters, card.head_parameters]
    in_layers = card.parameters - sum(ends)
    if summed_rows(card, arrangement) is not None:
        ends = [card.head_parameters]
    bucket_bytes = 2**20 * bucket_mib(arrangement.compute_bytes * card.parameters)
    bucket = max(bucket_bytes // arrangement.compute_bytes, card.largest_layer_parameters // 2)
    layers = min(in_layers, most_buckets_in_flight(2 * arrangement.sent_bytes(bucket)) * bucket)
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
        # Resident at the moments that need most: what this rank fills.
        return SLOTS_IN_TURN * arrangement.compute_bytes * (layer + _piece_numel(card))
    # What others sent; and what is sent to them: the gradients as laid out, or from a place of its own.
    from_others = 1 - 1 / arrangement.world_size
    places = from_others + (1 if _is_sent_as_laid_out(arrangement) else from_others)
    reduction = arrangement.sent_bytes(layer) * places
    in_flight = min(max(LEAST_IN_FLIGHT, int(ROOM_IN_FLIGHT_BYTES // reduction)), card.layers)
    return int(reduction * in_flight * POOL_ROUNDING)


def _piece_numel(card: ModelCard) -> int:
    """Of an embedding or head that passes through memory in pieces; 0 where both are no larger than a layer."""
    largest = max(card.embedding_parameters, card.head_parameters)
    return min(largest, PASSED_AT_ONCE_NUMEL) if largest > card.largest_layer_parameters else 0


def _shard(card: ModelCard, arrangement: Arrangement, loss: _Loss) -> Iterator[Moment]:
    compute = arrangement.compute_bytes
    kept, backward = kept_bytes(card, arrangement), backward_bytes(card, arrangement)
    layer, lookup = card.largest_layer_parameters, card.embedding_parameters
    head = lookup if card.tied else card.head_parameters
    keep, pool = arrangement.keep_gathered, pooled(card, arrangement)
    own_head = 4 * (fp32_head(card, arrangement) or share(head, arrangement))
    own_all = gradient_bytes(card, arrangement)
    earlier = 0
    if arrangement.accumulation_steps > 1:
        # Of earlier micro-batches: this rank's sums, or whole gradients where nothing is sent before the last one.
        earlier = 4 * card.parameters if keep else own_all
    table, fetched = table_parameters(card, arrangement), fetched_parameters(card, arrangement)
    gathered = compute * (card.parameters - table)
    # A group on its way needs its place, gloo's flat copy of it, and the group in use beside it.
    on_its_way = 0 if keep else compute * 2 * layer

    yield Moment(
        name="gathering the head",
        gradients=earlier,
        activations=kept,
        buffers=pool + (gathered + compute * head if keep else compute * (layer + 2 * head)),
    )
    yield Moment(
        name="loss",
        gradients=earlier + loss.head_gradient,
        activations=kept,
        logits=loss.chunk,
        whole_logits=loss.is_whole,
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
        + (0 if card.tied else leaving)
        + (still_gathered if keep else on_its_way + compute * layer)
        + (compute * head if card.tied and keep else 0),
    )
    last_activations = arrangement.tokens_per_forward * compute * card.hidden
    if table:
        # The gradient above the lookup in fp32, that of its rows, what is sent and received of it.
        above = arrangement.tokens_per_forward * 4 * card.hidden
        yield Moment(
            name="the lookup table's gradient leaves",
            gradients=(0 if keep else earlier) + own_all + 4 * fetched,
            activations=last_activations + above,
            buffers=pool + 2 * arrangement.sent_bytes(fetched),
        )
        return
    table_gradients = 2 if card.tied and not card.has_one_table_gradient else 1
    yield Moment(
        name="the lookup table's gradient leaves",
        gradients=(0 if keep else earlier) + own_all + compute * lookup * table_gradients,
        activations=last_activations,
        buffers=pool + _leaving(lookup, layer, arrangement),
    )


def _leaving(parameters: int, layer: int, arrangement: Arrangement) -> int:
    """A gradient laid out, and what is sent and received of it: all, or two pieces where it is large."""
    whole = parameters <= max(layer, WHOLE_UP_TO_NUMEL)
    sent = arrangement.sent_bytes(parameters if whole else LEAST_IN_FLIGHT * PIECE_NUMEL)
    from_others = sent * (arrangement.world_size - 1) // arrangement.world_size
    if _is_sent_as_laid_out(arrangement):
        return arrangement.sent_bytes(parameters) + from_others
    return 4 * parameters + 2 * from_others


def _is_sent_as_laid_out(arrangement: Arrangement) -> bool:
    """Gradients are laid out in fp32, or as computed where that is how they travel and no sum of several passes."""
    sums_whole = arrangement.keep_gathered and arrangement.accumulation_steps > 1
    return arrangement.gradient_form == "fp32" or (arrangement.dtype == "bf16" and not sums_whole)


# -- shard on one host


def _one_host(card: ModelCard, arrangement: Arrangement, loss: _Loss) -> Iterator[Moment]:
    """The weights are counted where each rank's rows are; what it reads of others' rows is resident beside them."""
    compute, from_others = arrangement.compute_bytes, 1 - 1 / arrangement.world_size
    kept, backward = kept_bytes(card, arrangement), backward_bytes(card, arrangement)
    layer, lookup = card.largest_layer_parameters, card.embedding_parameters
    head = lookup if card.tied else card.head_parameters
    pool = pooled(card, arrangement)
    own_head = 4 * (fp32_head(card, arrangement) or share(head, arrangement))
    own_all = gradient_bytes(card, arrangement)
    # Sums of earlier micro-batches, to which later ones are added.
    earlier = own_all if arrangement.accumulation_steps > 1 else 0
    gives_back = compute * card.parameters > RESIDENT_UP_TO_BYTES

    def read(parameters: int) -> int:
        """Resident while so many weights are in use; all of them where nothing is given back."""
        return int(compute * from_others * (parameters if gives_back else card.parameters))

    # Of two groups' gradients, or of two pieces of a table, what the others filled; except where room is made.
    others_filled = int(SLOTS_IN_TURN * compute * from_others * layer)
    pieces_read = int(SLOTS_IN_TURN * compute * from_others * _piece_numel(card))
    from_the_step_before = 0 if gives_back else others_filled + pieces_read
    yield Moment(
        name="loss",
        gradients=earlier + loss.head_gradient,
        activations=kept,
        logits=loss.chunk,
        whole_logits=loss.is_whole,
        shared=pool + read(head) + from_the_step_before,
    )
    if not card.tied:
        yield Moment(
            name="the head's gradient leaves",
            gradients=max(earlier, own_head) + compute * head,
            activations=kept,
            shared=pool + (pieces_read if head > layer else others_filled) + read(0),
        )
    # A head that has left in pieces leaves these behind.
    behind = 0 if card.tied and gives_back else pieces_read
    yield Moment(
        name="backward of the last layer",
        gradients=max(earlier, 0 if card.tied else own_head) + compute * (layer + (head if card.tied else 0)),
        activations=kept + backward,
        shared=pool + others_filled + behind + read(layer),
    )
    table_gradients = 2 if card.tied and not card.has_one_table_gradient else 1
    yield Moment(
        name="the lookup table's gradient leaves",
        gradients=own_all + compute * lookup * table_gradients,
        activations=arrangement.tokens_per_forward * compute * card.hidden,
        shared=pool + (pieces_read if lookup > layer else others_filled) + read(0),
    )
