"""A plan with only what the launcher reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from coremill.plan.types import Choice, Plan


def rank_plan(ranks: int, *, threads: int = 1, cpus: tuple[tuple[int, ...], ...] = ()) -> Plan:
    """`ranks` processes on this machine."""
    return cast(
        Plan,
        SimpleNamespace(
            ranks_per_node=Choice(ranks, "asked for"),
            threads_per_rank=Choice(threads, "one per core of the rank"),
            cpus_of_rank=cpus,
        ),
    )
