"""What an engine costs that leaves 1/N of weights, gradients and optimizer state to each rank, however they exchange
them. Torch-free."""

from __future__ import annotations

from math import ceil

from coremill.engines.optimizers.cost import COPY_BYTES, COSTS, WEIGHT_BYTES
from coremill.hardware.facts import Fleet
from coremill.plan.card import ModelCard
from coremill.plan.engine_cost import AutoChoice, EngineCost, StateBytes
from coremill.plan.peak import StepPoint, fp32_head_parameters
from coremill.plan.types import Arrangement
from coremill.plan.words import size


class ShardedStateCost(EngineCost):
    holds_whole_model = False
    has_copy = False  # in bf16, of a rank's own weights beside their masters, to compute with

    def state(self, card: ModelCard, arrangement: Arrangement) -> StateBytes:
        """fp32, of a rank's rows; of a head that is not rounded to bf16, and so not sharded either, all rows. Of a base
        its rows in the dtype that it is computed with."""
        whole, ranks = fp32_head_parameters(card, arrangement), arrangement.world_size
        trained_whole = whole if card.trains_the_head else 0
        trained = trained_whole + share_of(card.trainable_parameters - trained_whole, ranks)
        copy = COPY_BYTES if self.has_copy and arrangement.dtype == "bf16" else 0
        base_whole = min(whole, card.base_parameters) if not trained_whole else 0
        base = 4 * base_whole + share_of(arrangement.compute_bytes * (card.base_parameters - base_whole), ranks)
        own_whole = whole - base_whole
        return StateBytes(
            parameters=(WEIGHT_BYTES + copy) * (own_whole + share_of(card.own_parameters - own_whole, ranks)) + base,
            gradients=4 * trained,
            optimizer=ceil(COSTS[arrangement.optimizer].state_bytes * trained),
            base=base,
        )

    def saved_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        return COSTS[arrangement.optimizer].saved_bytes(card)

    def optimizer_seconds(self, card: ModelCard, arrangement: Arrangement, fleet: Fleet) -> float:
        """Of a rank's share."""
        has_copy = self.has_copy and arrangement.dtype == "bf16"
        own = card.trainable_parameters / arrangement.world_size
        return COSTS[arrangement.optimizer].seconds(own, arrangement, fleet, has_copy=has_copy)

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
        return (
            f"the whole model with gradients and moments, {state}, and its activations do not fit into the {limit} of"
            f" a rank: each holds 1/{ranks}"
        )

    def head_gradient_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        """Of a rank's rows of the head, once it is summed."""
        if not card.trains_the_head:
            return 0
        head = card.embedding_parameters if card.tied else card.head_parameters
        return 4 * (fp32_head_parameters(card, arrangement) or share_of(head, arrangement.world_size))

    def summed_head(self, card: ModelCard, arrangement: Arrangement) -> list[StepPoint]:
        """The end of a step with a head that is whole on every rank: its gradient, and the flat copy that is summed
        over ranks (engines/shard/kept_in_fp32.py)."""
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


def share_of(parameters: int, ranks: int) -> int:
    return ceil(parameters / ranks)
