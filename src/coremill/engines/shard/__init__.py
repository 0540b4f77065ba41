"""1/N of weights, gradients and optimizer state on every rank.

Through memory where all ranks are on one host (engines/one_host/), else through gloo; beside either, weights that a
model wants in fp32 whatever the rest computes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coremill.engines.shard.cost import ShardCost, rounds

if TYPE_CHECKING:
    from coremill.engines.base import Engine
    from coremill.engines.optimizers import OptimizerSettings
    from coremill.plan.types import Plan
    from coremill.world.group import World


class Shard:
    name = "shard"
    cost = ShardCost()
    keeps_replicas = False
    modules = (
        "coremill.engines.one_host.engine",
        "coremill.engines.shard.engine",
        "coremill.engines.shard.kept_in_fp32",
    )

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
        """In the form that this world and dtype ask for."""
        import torch

        from coremill.engines.base import DTYPES
        from coremill.engines.one_host.engine import OneHostShardEngine
        from coremill.engines.one_host.shared_memory import meet_host_peers
        from coremill.engines.shard.engine import ShardEngine
        from coremill.engines.shard.kept_in_fp32 import KeepsInFp32
        from coremill.engines.wire.codec import codec_of
        from coremill.plan.traffic import gradient_form

        dtype, wire = plan.dtype.value, plan.wire_dtype.value
        may_share = through_memory and world.size > 1 and not rounds(wire, dtype)
        peers = meet_host_peers(world) if may_share else "several hosts, or a wire dtype that rounds"
        made: Engine
        if isinstance(peers, str):
            made = ShardEngine(
                world,
                optimizer,
                compute_dtype=DTYPES[dtype],
                gradient_codec=codec_of(gradient_form(wire, dtype)),
                weight_wire_dtype=torch.bfloat16 if wire == "bf16" else None,
                keep_gathered=plan.keep_gathered.value,
                accumulates=plan.accumulation_steps.value > 1,
                head_in_backward=head_in_backward,
                why_wire=peers,
                named_rows=named_rows,
            )
        else:
            made = OneHostShardEngine(world, peers, optimizer, compute_dtype=DTYPES[dtype])
        return made if dtype == "fp32" else KeepsInFp32(made, world, optimizer, DTYPES[dtype])
