"""1/N of weights, gradients and optimizer state on every rank.

Through memory where all ranks are on one host (engines/one_host/), else through gloo; beside either, weights that a
model wants in fp32 whatever the rest computes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coremill.engines.shard.cost import ShardCost, rounds

if TYPE_CHECKING:
    from coremill.config.schema import TrainSection
    from coremill.engines.base import Engine
    from coremill.plan.types import Plan
    from coremill.world.group import World


class Shard:
    """The registered kind."""

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
        settings: TrainSection,
        *,
        head_in_backward: bool,
        through_memory: bool,
        named_rows: bool,
    ) -> Engine:
        """In the form that this world and dtype ask for."""
        from coremill.engines.base import DTYPES
        from coremill.engines.shard.kept_in_fp32 import KeepsInFp32

        made = _make(
            plan,
            world,
            settings,
            head_in_backward=head_in_backward,
            through_memory=through_memory,
            named_rows=named_rows,
        )
        dtype = plan.dtype.value
        return made if dtype == "fp32" else KeepsInFp32(made, world, settings, DTYPES[dtype])


def _make(
    plan: Plan,
    world: World,
    settings: TrainSection,
    *,
    head_in_backward: bool,
    through_memory: bool,
    named_rows: bool,
) -> Engine:
    import torch

    from coremill.engines.base import DTYPES
    from coremill.engines.one_host.engine import OneHostShardEngine
    from coremill.engines.one_host.shared_memory import meet_host_peers
    from coremill.engines.shard.engine import ShardEngine
    from coremill.engines.wire.codec import codec_of
    from coremill.plan.traffic import gradient_form

    dtype, wire = plan.dtype.value, plan.wire_dtype.value
    why_wire = "several hosts, or a wire dtype that rounds"
    if through_memory and not rounds(wire, dtype) and world.size > 1:
        peers = meet_host_peers(world)
        if not isinstance(peers, str):
            return OneHostShardEngine(world, peers, settings, compute_dtype=DTYPES[dtype])
        why_wire = peers
    return ShardEngine(
        world,
        settings,
        compute_dtype=DTYPES[dtype],
        gradient_codec=codec_of(gradient_form(wire, dtype)),
        weight_wire_dtype=torch.bfloat16 if wire == "bf16" else None,
        keep_gathered=plan.keep_gathered.value,
        accumulates=plan.accumulation_steps.value > 1,
        head_in_backward=head_in_backward,
        why_wire=why_wire,
        named_rows=named_rows,
    )
