"""1/N of weights, gradients and optimizer state on every rank.

Through memory where all ranks are on one host (engines/one_host/), else through gloo; beside either, weights that a
model wants in fp32 whatever the rest computes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coremill.engines.one_host import MODULES
from coremill.engines.shard.cost import ShardCost

if TYPE_CHECKING:
    from torch import nn

    from coremill.engines.base import Engine
    from coremill.engines.optimizers import OptimizerSettings
    from coremill.engines.update import OptimizerUpdate
    from coremill.plan.types import Plan
    from coremill.world.group import World


class Shard:
    name = "shard"
    cost = ShardCost()
    keeps_replicas = False
    modules = (*MODULES, "coremill.engines.shard.engine")

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
        """In the form that this world and dtype ask for."""
        import torch

        from coremill.engines.base import DTYPES
        from coremill.engines.kept_in_fp32 import KeepsInFp32
        from coremill.engines.one_host import make_one_host
        from coremill.engines.shard.engine import ShardEngine
        from coremill.engines.wire.codec import codec_of
        from coremill.plan.traffic import gradient_form

        dtype, wire = plan.dtype.value, plan.wire_dtype.value
        made: OptimizerUpdate | str = "not asked for"
        if through_memory:
            made = make_one_host("shard", plan, world, optimizer, in_any_order=False)
        if isinstance(made, str):
            made = ShardEngine(
                world,
                optimizer,
                compute_dtype=DTYPES[dtype],
                gradient_codec=codec_of(gradient_form(wire, dtype)),
                weight_wire_dtype=torch.bfloat16 if wire == "bf16" else None,
                keep_gathered=plan.keep_gathered.value,
                accumulates=plan.accumulation_steps.value > 1,
                head_in_backward=head_in_backward,
                why_wire=made,
                named_rows=named_rows,
            )
        return made if dtype == "fp32" else KeepsInFp32(made, world, optimizer, DTYPES[dtype])
