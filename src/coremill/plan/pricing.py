"""One arrangement of a run in bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.config.durations import Interval
from coremill.hardware.facts import Fleet
from coremill.plan.allocator import allocator_of
from coremill.plan.card import ModelCard
from coremill.plan.engine_cost import cost_of
from coremill.plan.learn import factors_of
from coremill.plan.memory import MemoryContext, memory_plan
from coremill.plan.time import step_seconds
from coremill.plan.traffic import Traffic
from coremill.plan.types import Arrangement, MemoryPlan, StepSeconds

NEVER = Interval()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One arrangement with its price in bytes and seconds."""

    arrangement: Arrangement
    memory: MemoryPlan
    traffic: Traffic
    seconds: StepSeconds

    @property
    def fits(self) -> bool:
        return self.memory.peak.total <= self.memory.limit

    @property
    def is_plain(self) -> bool:
        """The whole model on every rank, nothing computed twice."""
        return cost_of(self.arrangement).holds_whole_model and not self.arrangement.activation_checkpointing


def price(
    card: ModelCard,
    arrangement: Arrangement,
    fleet: Fleet,
    limit_bytes_per_rank: int,
    *,
    saving: Interval = NEVER,
    steps: int | None = None,
) -> Candidate:
    """One arrangement in bytes and seconds; `saving` is how often checkpoints are written, `steps` the run's length."""
    traffic = cost_of(arrangement).traffic(card, arrangement)
    learned = factors_of(
        fleet.calibration, engine=arrangement.engine, dtype=arrangement.dtype, optimizer=arrangement.optimizer
    )
    seconds = learned.scaled(step_seconds(card, arrangement, fleet, traffic))
    context = MemoryContext(
        base_bytes=fleet.calibration.base_rss_bytes,
        limit_bytes_per_rank=limit_bytes_per_rank,
        allocator=allocator_of(fleet.node.architecture, arrangement.dtype),
        slack_factor=learned.slack,
        saves=saving != NEVER,
        saves_during_run=_due_before_the_end(saving, steps, seconds.total),
    )
    memory = memory_plan(card, arrangement, context)
    return Candidate(arrangement=arrangement, memory=memory, traffic=traffic, seconds=seconds)


def _due_before_the_end(saving: Interval, steps: int | None, seconds_per_step: float) -> bool:
    """Whether a checkpoint is written while training goes on; a run of unknown length is taken for a long one."""
    if saving.steps is not None:
        return steps is None or saving.steps < steps
    return saving.seconds is not None and (steps is None or saving.seconds < steps * seconds_per_step)
