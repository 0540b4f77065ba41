"""What an engine costs that leaves 1/N of weights, gradients and optimizer state to each rank, however they exchange
them. Torch-free."""

from __future__ import annotations

from math import ceil

from coremill.engines.optimizers.cost import COSTS, GRADIENT_BYTES, WEIGHT_BYTES
from coremill.hardware.facts import Fleet
from coremill.plan.card import ModelCard
from coremill.plan.engine_cost import AutoChoice, EngineCost, StateBytes
from coremill.plan.peak import StepPoint, fp32_head_parameters
from coremill.plan.types import Arrangement
from coremill.plan.words import size


class ShardedStateCost(EngineCost):
    holds_whole_model = False
    updates = ("after", "inside")
    has_copy = False  # in bf16, of a rank's own weights beside their masters, to compute with

    def state(self, card: ModelCard, arrangement: Arrangement) -> StateBytes:
        """As the optimizer has them, of a rank's rows; of a head that is not rounded to bf16, and so not sharded
        either, all rows. Of a base its rows in the dtype that it is computed with."""
        cost = COSTS[arrangement.optimizer]
        whole, ranks = fp32_head_parameters(card, arrangement), arrangement.world_size
        weight = cost.weight_bytes(arrangement) + (cost.copy_bytes(arrangement) if self.has_copy else 0)
        base_whole = 0 if card.trains_the_head else min(whole, card.base_parameters)
        base = 4 * base_whole + share_of(arrangement.compute_bytes * (card.base_parameters - base_whole), ranks)
        own_whole = whole - base_whole
        rows = share_of(card.own_parameters - own_whole, ranks)
        return StateBytes(
            parameters=weight * rows + max(weight, WEIGHT_BYTES) * own_whole + base,
            gradients=0 if arrangement.update == "inside" else self.summed_bytes(card, arrangement),
            optimizer=cost.held_bytes(card, _trained(card, arrangement), arrangement),
            base=base,
        )

    def summed_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        """Of a rank's rows of all gradients, once they are summed over ranks."""
        return GRADIENT_BYTES * _trained(card, arrangement)

    def saved_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        return COSTS[arrangement.optimizer].saved_bytes(card, arrangement)

    def optimizer_seconds(self, card: ModelCard, arrangement: Arrangement, fleet: Fleet) -> float:
        """Of a rank's share."""
        cost, own = COSTS[arrangement.optimizer], card.trainable_parameters / arrangement.world_size
        has_copy = self.has_copy and cost.copy_bytes(arrangement) > 0
        return cost.seconds(own, arrangement, fleet, has_copy=has_copy)

    def reason(self, choice: AutoChoice) -> str:
        ranks, state, limit = choice.arrangement.world_size, size(choice.whole_model.total), size(choice.limit_bytes)
        if choice.whole_model_seconds is not None:
            return (
                f"each rank holds 1/{ranks}: {choice.step_seconds:.3g} s per step against"
                f" {choice.whole_model_seconds:.3g} s with the whole model on each"
            )
        if base := choice.whole_model.base * choice.arrangement.ranks_per_node:
            return (
                f"the model that adapters are trained beside, {size(base)}, and its activations do not fit into one"
                f" machine, {size(choice.limit_bytes * choice.arrangement.ranks_per_node)}: each rank holds 1/{ranks}"
            )
        gradients = "" if choice.arrangement.update == "inside" else "gradients and "
        return (
            f"the whole model with {gradients}moments, {state}, and its activations do not fit into the {limit} of"
            f" a rank: each holds 1/{ranks}"
        )

    def head_gradient_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        """Of a rank's rows of the head, once it is summed; where weights move inside of backward, until they have."""
        if not card.trains_the_head:
            return 0
        head = card.embedding_parameters if card.tied else card.head_parameters
        return GRADIENT_BYTES * (fp32_head_parameters(card, arrangement) or share_of(head, arrangement.world_size))

    def summed_head(self, card: ModelCard, arrangement: Arrangement) -> list[StepPoint]:
        """The end of a step with a head that is whole on every rank: its gradient, and the flat copy that is summed
        over ranks (engines/kept_in_fp32.py)."""
        if not (whole := fp32_head_parameters(card, arrangement)) or not card.trains_the_head:
            return []
        waiting = self.between_steps(card, arrangement)
        return [
            StepPoint(
                name="the fp32 head's gradient is summed",
                gradients=self.state(card, arrangement).gradients + 4 * whole,
                buffers=waiting.buffers,
                shared=waiting.shared,
            )
        ]


def _trained(card: ModelCard, arrangement: Arrangement) -> int:
    """Parameters that a rank updates."""
    whole = fp32_head_parameters(card, arrangement) if card.trains_the_head else 0
    return whole + share_of(card.trainable_parameters - whole, arrangement.world_size)


def share_of(parameters: int, ranks: int) -> int:
    return ceil(parameters / ranks)
