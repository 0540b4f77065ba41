"""Ranks of one host: weights lie once in memory that they share, and gradients pass through it. Both engines that hold
the state of a model work so where all ranks are on one host; they differ where gradients cross a wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from coremill.engines.one_host.engine import OneHostEngine
    from coremill.engines.optimizers import OptimizerSettings
    from coremill.plan.types import Plan
    from coremill.world.group import World

MODULES = ("coremill.engines.one_host.engine", "coremill.engines.kept_in_fp32")


def rounds(wire_dtype: str, dtype: str) -> bool:
    """Whether what travels is less exact than what was computed: memory that ranks share holds it as computed."""
    return wire_dtype != "fp32" and dtype == "fp32"


def make_one_host(
    name: str, plan: Plan, world: World, optimizer: OptimizerSettings, *, in_any_order: bool
) -> OneHostEngine | str:
    """In words where that cannot be, the same on every rank. `in_any_order`: for models that use weights in another
    order than their layers stand in."""
    from coremill.engines.base import DTYPES
    from coremill.engines.one_host.engine import OneHostEngine
    from coremill.engines.one_host.shared_memory import meet_host_peers

    if world.size == 1:
        return "one rank"
    if rounds(plan.wire_dtype.value, plan.dtype.value):
        return f"parallel.wire_dtype {plan.wire_dtype.value} rounds what is sent"
    peers = meet_host_peers(world)
    if isinstance(peers, str):
        return peers
    dtype = DTYPES[plan.dtype.value]
    return OneHostEngine(name, world, peers, optimizer, compute_dtype=dtype, in_any_order=in_any_order)


def why_not_cut(model: nn.Module) -> str | None:
    """Why a model cannot be cut by rows and layers; None where it can."""
    from coremill.engines.one_host.engine import in_backward_order
    from coremill.errors import InputError
    from coremill.model.slices import check_has_rows

    try:
        check_has_rows(model)
        in_backward_order(model)
    except InputError as error:
        return error.what
    return None
