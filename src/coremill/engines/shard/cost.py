"""What shard costs: 1/N of the state on every rank, weights gathered for use and gradients scattered, layer by layer.
Torch-free. On one host it has another form (engines/one_host/cost.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from coremill.engines.one_host.cost import OneHostCost, shares_memory
from coremill.engines.optimizers.cost import GRADIENT_BYTES
from coremill.engines.sharded_state import ShardedStateCost, share_of
from coremill.engines.wire.sizes import (
    LEAST_IN_FLIGHT,
    PIECE_NUMEL,
    POOL_ROUNDING,
    ROOM_IN_FLIGHT_BYTES,
    WHOLE_UP_TO_NUMEL,
)
from coremill.plan.activations import backward_bytes, kept_bytes
from coremill.plan.card import ModelCard
from coremill.plan.engine_cost import WORTH_KEEPING, EngineCost
from coremill.plan.peak import LossBytes, StepPoint
from coremill.plan.traffic import Traffic, looked_up_parameters, named_rows
from coremill.plan.types import Arrangement

ON_ONE_HOST = OneHostCost()


class ShardCost(ShardedStateCost):
    tried_by_auto = True
    relief = "share the state among ranks"

    def form(self, arrangement: Arrangement) -> EngineCost:
        """Through memory where ranks of one host round nothing on its way: gradients lie there as computed."""
        return ON_ONE_HOST if shares_memory(arrangement) else self

    def step_points(
        self, card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool
    ) -> Iterator[StepPoint]:
        """One backward pass: the loss is first, the lookup table last."""
        loss = LossBytes.of(card, arrangement, linear_copies_weight=linear_copies_weight)
        compute = arrangement.compute_bytes
        kept, backward = kept_bytes(card, arrangement), backward_bytes(card, arrangement)
        layer, trained_layer = card.largest_layer_parameters, card.largest_trainable_layer_parameters
        head = card.embedding_parameters if card.tied else card.head_parameters
        trained_head = head if card.trains_the_head else 0
        keep, pool = arrangement.keep_gathered, self.between_steps(card, arrangement).buffers
        own_head = self.head_gradient_bytes(card, arrangement)
        earlier = self._earlier_gradient_bytes(card, arrangement)
        gathered = compute * (card.held_parameters - table_parameters(card, arrangement))
        # A group on its way needs its place, gloo's flat copy of it, and the group in use beside it.
        on_its_way = 0 if keep else compute * 2 * layer

        yield StepPoint(
            name="gathering the head",
            gradients=earlier,
            activations=kept,
            buffers=pool + (gathered + compute * head if keep else compute * (layer + 2 * head)),
        )
        yield loss.point(gradients=earlier, activations=kept, buffers=pool + (gathered if keep else compute * head))
        # Tied weights leave last, with the lookup table's gradient.
        leaving = _leaving_bytes(trained_head, trained_layer, arrangement)
        still_gathered = gathered - compute * head if keep else 0
        if trained_head and not card.tied:
            yield StepPoint(
                name="the head's gradient leaves",
                gradients=earlier + compute * head + own_head,
                activations=kept,
                buffers=pool + leaving + still_gathered + on_its_way,
            )
        yield StepPoint(
            name="backward of the last layer",
            gradients=earlier + compute * trained_layer + (compute * trained_head if card.tied else own_head),
            activations=kept + backward,
            buffers=pool
            + (0 if card.tied else leaving)
            + (still_gathered if keep else on_its_way + compute * layer)
            + (compute * head if card.tied and keep else 0),
        )
        yield self._end_of_backward(card, arrangement)
        yield from self.summed_head(card, arrangement)

    def _earlier_gradient_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        """Of earlier micro-batches: this rank's sums, or whole gradients where nothing is sent before the last one."""
        if arrangement.accumulation_steps == 1:
            return 0
        if arrangement.keep_gathered:
            return GRADIENT_BYTES * card.trainable_parameters
        return self.summed_bytes(card, arrangement)

    def _end_of_backward(self, card: ModelCard, arrangement: Arrangement) -> StepPoint:
        compute, lookup = arrangement.compute_bytes, card.trainable_embedding_parameters
        own_all, pool = self.state(card, arrangement).gradients, self.between_steps(card, arrangement).buffers
        standing = own_all + (0 if arrangement.keep_gathered else self._earlier_gradient_bytes(card, arrangement))
        if arrangement.update == "inside":  # a layer's on their way, and those of the table, which wait for the end
            own = share_of(lookup + card.largest_trainable_layer_parameters, arrangement.world_size)
            standing = GRADIENT_BYTES * own
        activations = arrangement.tokens_per_forward * compute * card.hidden
        if table_parameters(card, arrangement) and lookup:
            # The gradient above the lookup in fp32, that of its rows, what is sent and received of it.
            fetched = _fetched_parameters(card, arrangement)
            gradients, buffers = 4 * fetched, 2 * arrangement.sent_bytes(fetched)
            activations += arrangement.tokens_per_forward * 4 * card.hidden
        else:
            gradients = compute * lookup * (2 if card.tied and not card.has_one_table_gradient else 1)
            buffers = _leaving_bytes(lookup, card.largest_trainable_layer_parameters, arrangement)
        return StepPoint(
            name="the lookup table's gradient leaves",
            gradients=standing + gradients,
            activations=activations,
            buffers=pool + buffers,
        )

    def between_steps(self, card: ModelCard, arrangement: Arrangement) -> StepPoint:
        """Buffers that are there from the first step on, used again by every layer."""
        if arrangement.world_size == 1:
            return StepPoint(name="between steps", gradients=0)
        # What others sent; and what is sent to them: the gradients as laid out, or from a place of its own.
        from_others = 1 - 1 / arrangement.world_size
        places = from_others + (1 if _is_sent_as_laid_out(arrangement) else from_others)
        trained_layers = sum(trained > 0 for trained in card.trainable_layer_parameters)
        reduction = arrangement.sent_bytes(card.largest_trainable_layer_parameters) * places
        in_flight = min(max(LEAST_IN_FLIGHT, int(ROOM_IN_FLIGHT_BYTES // max(1, reduction))), trained_layers)
        return StepPoint(name="between steps", gradients=0, buffers=int(reduction * in_flight * POOL_ROUNDING))

    def traffic(self, card: ModelCard, arrangement: Arrangement) -> Traffic:
        """Weights around, gradients to whom they belong."""
        ranks = arrangement.world_size
        gathered = arrangement.gather_bytes * _gathered_parameters(card, arrangement)
        if _fetched_parameters(card, arrangement):
            gathered += arrangement.accumulation_steps * card.vocabulary_rows  # a byte a row: whether it is needed
        reduced = arrangement.sent_bytes(_reduced_parameters(card, arrangement))
        return Traffic(gather_bytes=(ranks - 1) * gathered // ranks, reduce_bytes=(ranks - 1) * reduced // ranks)

    def overlap_seconds(self, arrangement: Arrangement, compute_seconds: float) -> float:
        """Everything; where weights are kept, gathers run beside the first forward, reductions beside the last
        backward."""
        passes = arrangement.accumulation_steps if arrangement.keep_gathered else 1
        return compute_seconds * (1.0 / passes)

    def keep_choices(self, arrangement: Arrangement, asked: Literal["auto"] | bool) -> tuple[bool, ...]:
        if arrangement.world_size == 1:
            return (False,)
        return (False, True) if asked == "auto" else (asked,)

    def keep_reason(self, arrangement: Arrangement, asked: Literal["auto"] | bool) -> str:
        if arrangement.world_size == 1:
            return "one rank: nothing is gathered"
        if asked != "auto":
            return "set by you"
        if arrangement.keep_gathered:
            return "memory allows it: weights are gathered once per step and gradients sent once"
        saved = f"{100 * (WORTH_KEEPING - 1):.0f} %"
        return f"weights are given back after use: keeping them does not fit, or saves less than {saved} of a step"


def table_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Of a lookup table that is never whole on a rank (embedding.py); 0 where it is a group like others."""
    return looked_up_parameters(card) if arrangement.world_size > 1 else 0


def _fetched_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Of such a table's rows, those of a micro-batch."""
    if not table_parameters(card, arrangement):
        return 0
    return named_rows(card, arrangement.tokens_per_forward) * card.lookup_width


def _gathered_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Weights gathered in one step: forward needs all; backward the layers again, but no lookup table and no head."""
    fetched = arrangement.accumulation_steps * _fetched_parameters(card, arrangement)
    whole = card.held_parameters - table_parameters(card, arrangement)
    if arrangement.keep_gathered:
        return whole + fetched
    # FSDP2 fetches the layer below ahead, also where backward ends above it.
    again = sum(card.held_layer_parameters[max(0, card.layers_below_backward - 1) :]) + card.rest_parameters
    if not card.block.plain_logits:
        again += card.embedding_parameters if card.tied else card.head_parameters
    return arrangement.accumulation_steps * (whole + again) + fetched


def _reduced_parameters(card: ModelCard, arrangement: Arrangement) -> int:
    """Gradients reduced in one step: after each micro-batch, or once where they wait whole."""
    if not card.trainable_embedding_parameters:
        return card.trainable_parameters * (1 if arrangement.keep_gathered else arrangement.accumulation_steps)
    whole = card.trainable_parameters - table_parameters(card, arrangement)
    fetched = arrangement.accumulation_steps * _fetched_parameters(card, arrangement)
    return whole * (1 if arrangement.keep_gathered else arrangement.accumulation_steps) + fetched


def _leaving_bytes(parameters: int, layer: int, arrangement: Arrangement) -> int:
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
