"""The whole model on every rank; gradients are exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coremill.engines.replicate.cost import ReplicateCost

if TYPE_CHECKING:
    from coremill.engines.base import Engine
    from coremill.engines.optimizers import OptimizerSettings
    from coremill.plan.types import Plan
    from coremill.world.group import World


class Replicate:
    name = "replicate"
    cost = ReplicateCost()
    keeps_replicas = True
    modules = ("coremill.engines.replicate.engine",)

    @staticmethod
    def make(
        plan: Plan,
        world: World,
        optimizer: OptimizerSettings,
        *,
        head_in_backward: bool,
        through_memory: bool,
        named_rows: bool,
    ) -> Engine:
        """Gradients always go through gloo."""
        from coremill.engines.base import DTYPES
        from coremill.engines.replicate.engine import ReplicateEngine
        from coremill.engines.wire.codec import codec_of
        from coremill.plan.traffic import gradient_form

        codec = codec_of(gradient_form(plan.wire_dtype.value, plan.dtype.value))
        dtype = DTYPES[plan.dtype.value]
        return ReplicateEngine(world, optimizer, compute_dtype=dtype, gradient_codec=codec, named_rows=named_rows)
