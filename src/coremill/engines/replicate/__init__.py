"""The whole model on every machine; gradients are exchanged.

Ranks of one host have one copy of it in memory that they share (engines/one_host/); over the wire each has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coremill.engines.one_host import MODULES
from coremill.engines.replicate.cost import ReplicateCost

if TYPE_CHECKING:
    from torch import nn

    from coremill.engines.base import Engine
    from coremill.engines.one_host.engine import OneHostEngine
    from coremill.engines.optimizers import OptimizerSettings
    from coremill.plan.types import Plan
    from coremill.world.group import World


def _require_room(plan: Plan, why: str) -> None:
    """The plan counts one copy of the model for ranks that share memory: where they cannot, whole ones have to fit."""
    from coremill.errors import InputError
    from coremill.plan.words import size

    needed, limit = plan.bytes_per_rank_over_the_wire, plan.memory.limit
    if needed is not None and plan.fits and needed > limit:
        raise InputError(
            f"{plan.ranks_per_node.value} ranks need {size(needed)} each, and there are {size(limit)}",
            where="parallel.ranks_per_node",
            why=f"they cannot share one copy of the model here: {why}",
            do="set parallel.ranks_per_node: 1",
        )


class Replicate:
    name = "replicate"
    cost = ReplicateCost()
    keeps_replicas = True
    modules = (*MODULES, "coremill.engines.replicate.engine")

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
        """Through memory where this world, dtype and model allow it."""
        from coremill.engines.base import DTYPES
        from coremill.engines.kept_in_fp32 import KeepsInFp32
        from coremill.engines.one_host import make_one_host, why_not_cut
        from coremill.engines.replicate.engine import ReplicateEngine
        from coremill.engines.wire.codec import codec_of
        from coremill.plan.traffic import gradient_form

        dtype = DTYPES[plan.dtype.value]
        shared: OneHostEngine | str = (why_not_cut(model) or "") if through_memory else "not asked for"
        if shared == "":
            shared = make_one_host("replicate", plan, world, optimizer, in_any_order=True)
        if isinstance(shared, str):
            if through_memory and world.size > 1:
                _require_room(plan, shared)
            codec = codec_of(gradient_form(plan.wire_dtype.value, plan.dtype.value))
            return ReplicateEngine(
                world, optimizer, compute_dtype=dtype, gradient_codec=codec, why_wire=shared, named_rows=named_rows
            )
        return shared if plan.dtype.value == "fp32" else KeepsInFp32(shared, world, optimizer, dtype)
