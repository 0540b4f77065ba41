"""How ranks share the work: the engine protocol and its strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coremill.plan.wire import gradient_form

if TYPE_CHECKING:
    from coremill.engines.base import Engine
    from coremill.plan.types import Plan
    from coremill.world.group import World


def make_engine(
    plan: Plan, world: World, *, head_in_backward: bool, through_memory: bool = True, named_rows: bool = True
) -> Engine:
    """The engine the plan chose; `through_memory=False` has ranks of one host talk like those of several,
    `named_rows=False` leaves lookups as they are: their tables and gradients travel whole (model/changes.py)."""
    import torch

    from coremill.engines.base import DTYPES

    compute_dtype = DTYPES[plan.dtype.value]
    if plan.engine.value != "replicate" and compute_dtype != torch.float32:
        from coremill.engines.shard.kept_in_fp32 import KeepsInFp32

        sharding = _make_engine(
            plan, world, head_in_backward=head_in_backward, through_memory=through_memory, named_rows=named_rows
        )
        return KeepsInFp32(sharding, world, compute_dtype)
    return _make_engine(
        plan, world, head_in_backward=head_in_backward, through_memory=through_memory, named_rows=named_rows
    )


def _make_engine(plan: Plan, world: World, *, head_in_backward: bool, through_memory: bool, named_rows: bool) -> Engine:
    import torch

    from coremill.engines.base import DTYPES
    from coremill.engines.wire.codec import codec_of

    compute_dtype = DTYPES[plan.dtype.value]
    wire = plan.wire_dtype.value
    gradient_codec = codec_of(gradient_form(wire, plan.dtype.value))
    if plan.engine.value == "replicate":
        from coremill.engines.replicate.engine import ReplicateEngine

        return ReplicateEngine(world, compute_dtype=compute_dtype, gradient_codec=gradient_codec, named_rows=named_rows)

    why_wire = "several hosts, or a wire dtype that rounds"
    rounds = wire != "fp32" and compute_dtype == torch.float32
    if through_memory and not rounds and world.size > 1:
        from coremill.engines.one_host.engine import OneHostShardEngine
        from coremill.engines.one_host.shared_memory import meet_neighbours

        neighbours = meet_neighbours(world)
        if not isinstance(neighbours, str):
            return OneHostShardEngine(world, neighbours, compute_dtype=compute_dtype)
        why_wire = neighbours

    from coremill.engines.shard.engine import ShardEngine

    return ShardEngine(
        world,
        compute_dtype=compute_dtype,
        gradient_codec=gradient_codec,
        weight_wire_dtype=torch.bfloat16 if wire == "bf16" else None,
        keep_gathered=plan.keep_gathered.value,
        accumulates=plan.accumulation_steps.value > 1,
        head_in_backward=head_in_backward,
        why_wire=why_wire,
        named_rows=named_rows,
    )
