"""What the plan asks of an engine, in bytes and seconds: each engine answers beside its own code, without torch.

The plan knows engines by what the registry finds under their names, and by these answers only. An engine's `cost` is a
subclass of EngineCost: what has an answer here is what holds for an engine that has the whole model on every rank and
exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from coremill.hardware.facts import Fleet
from coremill.plan.card import ModelCard
from coremill.plan.peak import StepPoint, fp32_head_parameters
from coremill.plan.traffic import Traffic
from coremill.plan.types import Arrangement
from coremill.registry import find, importable

# With one pass per step gathered weights are kept only where that saves more of the step than this: they take as much
# memory as the whole model. With several passes not keeping them would send everything once per pass.
WORTH_KEEPING = 1.03


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What a rank holds of the model from step to step."""

    parameters: int  # in the dtype they are kept in, copies in the compute dtype included
    gradients: int  # once backward is through
    optimizer: int
    base: int = 0  # of the parameters: of a model that adapters are trained beside

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class AutoChoice:
    """What `parallel.engine: auto` led to, beside the whole model on every rank."""

    arrangement: Arrangement
    step_seconds: float
    limit_bytes: int  # per rank
    whole_model: StateBytes
    whole_model_seconds: float | None  # of a step, the quickest that fits and recomputes nothing; None: none fits


class EngineCost(Protocol):
    """The price of one engine."""

    tried_by_auto: bool = False  # whether `parallel.engine: auto` looks at it
    holds_whole_model: bool = True  # on every rank
    updates: tuple[Literal["after", "inside"], ...] = ("after",)  # values of `train.update` that it has
    relief: str | None = None  # in words, what it does where the whole model does not fit; None: it is not offered

    def form(self, arrangement: Arrangement) -> EngineCost:
        """The price where ranks lie like this, of an engine that has several ways to work."""
        return self

    def state(self, card: ModelCard, arrangement: Arrangement) -> StateBytes:
        """Held by one rank."""

    def step_points(
        self, card: ModelCard, arrangement: Arrangement, *, linear_copies_weight: bool
    ) -> Iterable[StepPoint]:
        """The candidates for a step's peak; `linear_copies_weight`: products make a turned copy of their weight."""

    def between_steps(self, card: ModelCard, arrangement: Arrangement) -> StepPoint:
        """What stands outside of forward and backward: buffers that wait for the next step."""
        return StepPoint(name="between steps", gradients=0)

    def saved_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        """The size of a checkpoint, all ranks together."""

    def traffic(self, card: ModelCard, arrangement: Arrangement) -> Traffic:
        """What one rank exchanges in a step."""
        return Traffic(gather_bytes=0, reduce_bytes=0)

    def overlap_seconds(self, arrangement: Arrangement, compute_seconds: float) -> float:
        """How much of a step's arithmetic its exchange can overlap with."""
        return 0.0

    def optimizer_seconds(self, card: ModelCard, arrangement: Arrangement, fleet: Fleet) -> float:
        """The update of what a rank holds."""

    def added_up_parameters(self, card: ModelCard, arrangement: Arrangement) -> float:
        """Of which a rank adds the gradients of several passes."""
        return card.trainable_parameters

    def keep_choices(self, arrangement: Arrangement, asked: Literal["auto"] | bool) -> tuple[bool, ...]:
        """Values of `parallel.keep_gathered` worth pricing."""
        return (False,)

    def keep_reason(self, arrangement: Arrangement, asked: Literal["auto"] | bool) -> str:
        """Why gathered weights are kept or given back."""
        return f"{arrangement.engine}: weights are always whole"

    def reason(self, choice: AutoChoice) -> str:
        """Why auto took this engine for several ranks."""
        return "the quickest that fits"


def base_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Of a model that adapters are trained beside, all of it: in the dtype that it is computed with."""
    in_fp32 = 0 if card.trains_the_head else fp32_head_parameters(card, arrangement)
    narrow = arrangement.compute_bytes * card.base_parameters
    return narrow + (4 - arrangement.compute_bytes) * min(in_fp32, card.base_parameters)


def cost_named(engine: str) -> EngineCost:
    cost: EngineCost = find("coremill.engines", engine).cost
    return cost


def cost_of(arrangement: Arrangement) -> EngineCost:
    """The cost of an arrangement's engine, in the form it has there."""
    return cost_named(arrangement.engine).form(arrangement)


def engines_for_auto(world_size: int) -> tuple[str, ...]:
    """The engines that `parallel.engine: auto` prices; one rank has nothing to share."""
    tried = {name: kind.cost for name, kind in importable("coremill.engines").items()}
    return tuple(
        name for name, cost in tried.items() if cost.tried_by_auto and (world_size > 1 or cost.holds_whole_model)
    )
