"""A made-up engine: one process, plain SGD with momentum. What it is and costs, without torch; sgd_engine.py is it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coremill.errors import InputError
from coremill.hardware.facts import Fleet
from coremill.plan.activations import backward_bytes, kept_bytes
from coremill.plan.card import ModelCard
from coremill.plan.engine_cost import EngineCost, StateBytes
from coremill.plan.peak import LossBytes, StepPoint
from coremill.plan.time import rank_share
from coremill.plan.types import Arrangement

if TYPE_CHECKING:
    from torch import nn

    from coremill.engines.base import Engine
    from coremill.engines.optimizers import OptimizerSettings
    from coremill.plan.types import Plan
    from coremill.world.group import World

WEIGHT_BYTES = GRADIENT_BYTES = VELOCITY_BYTES = 4
UPDATE_BYTES = 20  # of a parameter: three tensors are read, two written


class SgdCost(EngineCost):
    """Weights, gradients and one velocity each, all fp32."""

    def form(self, arrangement: Arrangement) -> EngineCost:
        """There is one, for one process in fp32."""
        if arrangement.world_size > 1 or arrangement.dtype != "fp32":
            raise InputError(
                f"sgd-guest is one process that computes in fp32, not {arrangement.world_size} in {arrangement.dtype}",
                where="parallel.engine",
                do="set parallel.ranks_per_node=1 and parallel.dtype=fp32, or another engine",
            )
        return self

    def state(self, card: ModelCard, arrangement: Arrangement) -> StateBytes:
        """Held by the one rank."""
        return StateBytes(
            parameters=WEIGHT_BYTES * card.parameters,
            gradients=GRADIENT_BYTES * card.trainable_parameters,
            optimizer=VELOCITY_BYTES * card.trainable_parameters,
        )

    def step_points(
        self, card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool
    ) -> Iterator[StepPoint]:
        """The loss, and what follows it."""
        gradients, kept = self.state(card, arrangement).gradients, kept_bytes(card, arrangement)
        loss = LossBytes.of(card, arrangement, linear_copies_weight=linear_copies_weight)
        yield loss.point(gradients=gradients, activations=kept)
        activations = kept + backward_bytes(card, arrangement)
        yield StepPoint(name="backward", gradients=gradients, activations=activations)

    def saved_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        """Weights and velocities."""
        return WEIGHT_BYTES * card.parameters + VELOCITY_BYTES * card.trainable_parameters

    def optimizer_seconds(self, card: ModelCard, arrangement: Arrangement, fleet: Fleet) -> float:
        """As long as memory takes."""
        rate = fleet.calibration.copy_bytes_per_second * rank_share(arrangement, fleet)
        return UPDATE_BYTES * card.trainable_parameters / rate


class Sgd:
    """The registered kind."""

    name = "sgd-guest"
    cost = SgdCost()
    keeps_replicas = False
    modules = ("mill_guests.sgd_engine",)

    @staticmethod
    def make(
        plan: Plan,
        world: World,
        optimizer: OptimizerSettings,
        model: nn.Module,
        *,
        head_in_backward: bool,
        through_memory: bool,
        named_rows: bool,
    ) -> Engine:
        """Nothing to choose."""
        from mill_guests.sgd_engine import SgdEngine

        return SgdEngine()
