"""How ranks share the work, and how each moves its weights: engines, found by the name the plan has for them.

No torch here, nor in what the registry finds: engines bring it along when one is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from coremill.registry import find

if TYPE_CHECKING:
    from torch import nn

    from coremill.engines.base import Engine
    from coremill.engines.optimizers import OptimizerSettings
    from coremill.plan.engine_cost import EngineCost
    from coremill.plan.types import Plan
    from coremill.world.group import World


class EngineKind(Protocol):
    """What is registered under an engine's name; importable without torch."""

    name: str
    cost: EngineCost
    keeps_replicas: bool  # every rank holds the same weights: on CPUs that round differently they might drift apart
    modules: tuple[str, ...]  # what a rank imports for it: the fork server does that ahead

    def make(
        self,
        plan: Plan,
        world: World,
        optimizer: OptimizerSettings,
        model: nn.Module,
        *,
        head_in_backward: bool,
        through_memory: bool,
        named_rows: bool,
    ) -> Engine:
        """For a model on meta, which it does not have to hold yet. `through_memory=False` has ranks of one host talk
        like those of several; `named_rows=False` leaves lookups as they are: their tables and gradients travel whole
        (model/changes.py)."""


def engine_kind(name: str) -> EngineKind:
    kind: EngineKind = find("coremill.engines", name)
    return kind


def make_engine(
    plan: Plan,
    world: World,
    optimizer: OptimizerSettings,
    model: nn.Module,
    *,
    head_in_backward: bool,
    through_memory: bool = True,
    named_rows: bool = True,
) -> Engine:
    return engine_kind(plan.engine.value).make(
        plan,
        world,
        optimizer,
        model,
        head_in_backward=head_in_backward,
        through_memory=through_memory,
        named_rows=named_rows,
    )
