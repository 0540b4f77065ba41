"""What a plan said, under the keys that the summary gives to what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEMORY_PHASES = {  # of the plan, and what ranks call them
    "load": "load",
    "first_step": "first_step",
    "steady_step": "steady_step",
    "checkpoint": "export",
}


def planned_figures(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What the plan said, under the keys of `measured`."""
    memory = plan.get("memory_bytes_per_rank") or {}
    return {
        "memory_bytes_per_rank": memory.get("total"),
        "memory_limit_bytes_per_rank": memory.get("limit"),
        "memory_bytes_by_phase": {
            phase: (plan.get("memory_by_phase") or {}).get(phase, {}).get("total") for phase in MEMORY_PHASES
        },
        "memory_parts_bytes": {name: size for name, size in memory.items() if name not in ("total", "limit")},
        "step_seconds": dict(plan.get("step_seconds") or {}),
        "tokens_per_second": plan.get("tokens_per_second"),
        **({"samples_per_second": rate} if (rate := plan.get("samples_per_second")) is not None else {}),
        "wire_bytes_per_step_per_rank": plan.get("wire_bytes_per_step_per_rank"),
        "usd_per_hour": plan.get("usd_per_hour"),
        **_planned_in_all(plan),
        "assumptions": list(plan.get("assumptions") or ()),
    }


def _planned_in_all(plan: Mapping[str, Any]) -> dict[str, float | None]:
    """Hours and dollars of all steps, as `seconds` is of all: a plan of a continuation says them of what was left."""
    steps, seconds, price = plan.get("steps"), (plan.get("step_seconds") or {}).get("total"), plan.get("usd_per_hour")
    hours = None if steps is None or seconds is None else steps * seconds / 3600
    return {"hours": hours, "usd": None if hours is None or price is None else hours * price}
