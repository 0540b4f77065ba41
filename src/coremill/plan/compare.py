"""The same run on several fleets, ranked by time and by money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coremill.config.schema import RunConfig
from coremill.hardware.facts import Fleet
from coremill.plan.card import ModelCard
from coremill.plan.planner import make_plan
from coremill.plan.types import Plan, RowCount


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same run on several fleets."""

    by_cost: tuple[Plan, ...]  # cheapest first; what does not fit or has no price comes last
    by_time: tuple[Plan, ...]  # quickest first; what does not fit comes last


def usd_per_million_tokens(plan: Plan) -> float | None:
    """What a million tokens cost on this fleet: comparable even where the number of steps is open."""
    if plan.usd_per_hour is None:
        return None
    return plan.usd_per_hour / 3600 / plan.tokens_per_second * 1e6


def compare_fleets(
    config: RunConfig, fleets: Sequence[Fleet], card: ModelCard, *, rows: RowCount | None = None
) -> Comparison:
    plans = [make_plan(config, fleet, card, rows=rows) for fleet in fleets]

    def cost_key(plan: Plan) -> tuple[bool, bool, float, str]:
        price = usd_per_million_tokens(plan)
        return (not plan.fits, price is None, price or 0.0, plan.fleet)

    return Comparison(
        by_cost=tuple(sorted(plans, key=cost_key)),
        by_time=tuple(sorted(plans, key=lambda plan: (not plan.fits, -plan.tokens_per_second, plan.fleet))),
    )
