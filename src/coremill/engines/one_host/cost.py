"""What an engine costs whose ranks are all on one host and share memory. Torch-free; it cuts by the same numbers.

The weights are counted where each rank's rows are; what it reads of others' rows is resident beside them.
"""

from __future__ import annotations

from collections.abc import Iterator

from coremill.engines.one_host import rounds
from coremill.engines.sharded_state import ShardedStateCost
from coremill.plan.activations import backward_bytes, kept_bytes
from coremill.plan.card import ModelCard
from coremill.plan.peak import LossBytes, StepPoint
from coremill.plan.traffic import Traffic
from coremill.plan.types import Arrangement

# Slots of one size that are used in turn: while slow ranks still read one, quick ones write the next.
SLOTS_IN_TURN = 2

# An embedding or head larger than a layer passes in pieces, so much of each rank's at once: few enough bytes to stay in
# the caches between who writes and who reads them.
PASSED_AT_ONCE_NUMEL = 2**21

# Of more weights than that, rows of other ranks are resident only while they are in use. Mapping them anew is felt
# where weights are large beside the arithmetic.
RESIDENT_UP_TO_BYTES = 2**28


def shares_memory(arrangement: Arrangement) -> bool:
    """Whether ranks do: those of one host that round nothing on its way."""
    is_one_host = arrangement.nodes == 1 and arrangement.world_size > 1
    return is_one_host and arrangement.through_memory and not rounds(arrangement.wire_dtype, arrangement.dtype)


class OneHostCost(ShardedStateCost):
    """1/N of the state on every rank, one copy of the weights on the host."""

    has_copy = True

    def added_up_parameters(self, card: ModelCard, arrangement: Arrangement) -> float:
        """Its own rows, which it sums for all."""
        return card.trainable_parameters / arrangement.world_size

    def step_points(
        self, card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool
    ) -> Iterator[StepPoint]:
        loss = LossBytes.of(card, arrangement, linear_copies_weight=linear_copies_weight)
        compute, from_others = arrangement.compute_bytes, 1 - 1 / arrangement.world_size
        kept, backward = kept_bytes(card, arrangement), backward_bytes(card, arrangement)
        layer, lookup = card.largest_trainable_layer_parameters, card.trainable_embedding_parameters
        table = card.embedding_parameters if card.tied else card.head_parameters
        head = table if card.trains_the_head else 0
        pool = self.between_steps(card, arrangement).shared
        own_head = self.head_gradient_bytes(card, arrangement)
        own_all = self.state(card, arrangement).gradients
        # Sums of earlier micro-batches, to which later ones are added.
        earlier = self.summed_bytes(card, arrangement) if arrangement.accumulation_steps > 1 else 0
        gives_back = compute * card.held_parameters > RESIDENT_UP_TO_BYTES

        def read(parameters: int) -> int:
            """Resident while so many weights are in use; all of them where nothing is given back."""
            return int(compute * from_others * (parameters if gives_back else card.held_parameters))

        # Of two groups' gradients, or of two pieces of a table, what the others filled; except where room is made.
        others_filled = int(SLOTS_IN_TURN * compute * from_others * layer)
        pieces_read = int(SLOTS_IN_TURN * compute * from_others * _piece_numel(card))
        from_the_step_before = 0 if gives_back else others_filled + pieces_read
        yield loss.point(gradients=earlier, activations=kept, shared=pool + read(table) + from_the_step_before)
        if head and not card.tied:
            yield StepPoint(
                name="the head's gradient leaves",
                gradients=max(earlier, own_head) + compute * head,
                activations=kept,
                shared=pool + (pieces_read if head > card.largest_layer_parameters else others_filled) + read(0),
            )
        # A head that has left in pieces leaves these behind.
        behind = 0 if card.tied and gives_back else pieces_read
        yield StepPoint(
            name="backward of the last layer",
            gradients=max(earlier, 0 if card.tied else own_head) + compute * (layer + (head if card.tied else 0)),
            activations=kept + backward,
            shared=pool + others_filled + behind + read(card.largest_layer_parameters),
        )
        table_gradients = 2 if card.tied and not card.has_one_table_gradient else 1
        yield StepPoint(
            name="the lookup table's gradient leaves" if lookup else "end of backward",
            gradients=own_all + compute * lookup * table_gradients,
            activations=arrangement.tokens_per_forward * compute * card.hidden,
            shared=pool + (pieces_read if lookup > card.largest_layer_parameters else others_filled) + read(0),
        )
        yield from self.summed_head(card, arrangement)

    def between_steps(self, card: ModelCard, arrangement: Arrangement) -> StepPoint:
        """What this rank fills of the slots; resident at the points that need most."""
        slot = arrangement.compute_bytes * (card.largest_trainable_layer_parameters + _piece_numel(card))
        return StepPoint(name="between steps", gradients=0, shared=SLOTS_IN_TURN * slot)

    def traffic(self, card: ModelCard, arrangement: Arrangement) -> Traffic:
        """Weights of others that are new after an update, gradients as they were computed."""
        compute, ranks = arrangement.compute_bytes, arrangement.world_size
        return Traffic(
            gather_bytes=(ranks - 1) * (arrangement.gather_bytes * card.trainable_parameters) // ranks,
            reduce_bytes=(ranks - 1) * (compute * card.trainable_parameters * arrangement.accumulation_steps) // ranks,
            through_memory=True,
        )

    def keep_reason(self, arrangement: Arrangement, asked: object) -> str:
        return "ranks of one host compute with one copy of the weights: nothing is gathered"


def _piece_numel(card: ModelCard) -> int:
    """Of an embedding or head that passes through memory in pieces; 0 where both are no larger than a layer."""
    largest = max(card.trainable_embedding_parameters, card.trainable_head_parameters)
    return min(largest, PASSED_AT_ONCE_NUMEL) if largest > card.largest_layer_parameters else 0
