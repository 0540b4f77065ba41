"""How ranks share the work: the engine protocol and its strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coremill.parallel.codec import codec_of
from coremill.plan.wire import gradient_form

if TYPE_CHECKING:
    from coremill.parallel.engine import Engine
    from coremill.plan.types import Plan
    from coremill.world import World


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_engine(plan: Plan, world: World, *, head_in_backward: bool, through_memory: bool = True) -> Engine:
    """The engine the plan chose; `through_memory=False` has ranks of one host talk like those of several."""
    compute_dtype = DTYPES[plan.dtype.value]
    if plan.engine.value != "replicate" and compute_dtype != torch.float32:
        from coremill.parallel.kept_in_fp32 import KeepsInFp32

        sharding = _make_engine(plan, world, head_in_backward=head_in_backward, through_memory=through_memory)
        return KeepsInFp32(sharding, world, compute_dtype)
    return _make_engine(plan, world, head_in_backward=head_in_backward, through_memory=through_memory)


def _make_engine(plan: Plan, world: World, *, head_in_backward: bool, through_memory: bool) -> Engine:
    compute_dtype = DTYPES[plan.dtype.value]
    wire = plan.wire_dtype.value
    gradient_codec = codec_of(gradient_form(wire, plan.dtype.value))
    if plan.engine.value == "replicate":
        from coremill.parallel.replicate import ReplicateEngine

        return ReplicateEngine(world, compute_dtype=compute_dtype, gradient_codec=gradient_codec)

    why_wire = "several hosts, or a wire dtype that rounds"
    rounds = wire != "fp32" and compute_dtype == torch.float32
    if through_memory and not rounds and world.size > 1:
        from coremill.parallel.neighbours import meet_neighbours
        from coremill.parallel.one_host import OneHostShardEngine

        neighbours = meet_neighbours(world)
        if not isinstance(neighbours, str):
            return OneHostShardEngine(world, neighbours, compute_dtype=compute_dtype)
        why_wire = neighbours

    from coremill.parallel.shard import ShardEngine

    return ShardEngine(
        world,
        compute_dtype=compute_dtype,
        gradient_codec=gradient_codec,
        weight_wire_dtype=torch.bfloat16 if wire == "bf16" else None,
        keep_gathered=plan.keep_gathered.value,
        accumulates=plan.accumulation_steps.value > 1,
        head_in_backward=head_in_backward,
        why_wire=why_wire,
    )
