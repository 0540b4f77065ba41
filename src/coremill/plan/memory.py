"""Bytes per rank, phase by phase and part by part.

What is alive is counted exactly: weights, gradients and moments here, what a layer keeps in plan/activations.py, the
moments at which a step may hold most in plan/moments.py. What the process takes besides (its libraries, threads, and
what the allocator keeps of freed memory) is measured: the base by calibration, the rest in plan/allocator.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coremill.plan.allocator import Habits
from coremill.plan.card import ModelCard
from coremill.plan.moments import Moment, fullest, gradient_bytes, held_parameters, moments_of_step, quiet_moment
from coremill.plan.types import Arrangement, MemoryPart, MemoryPlan

__all__ = ["MemoryPlan", "Surroundings", "gradient_bytes", "memory_plan", "optimizer_bytes", "parameter_bytes"]

MIB = 2**20

# Rows are memory-mapped and a batch is small: the loader, its index, and pages in use.
DATA_BYTES = 4 * MIB
# A slice on its way from file to parameter.
LOAD_SLICE_BYTES = 64 * MIB
# Rows of a tensor on their way to a file or from another rank.
EXPORT_BYTES = 24 * MIB


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What memory depends on besides model and arrangement."""

    base_bytes: int  # an interpreter with the libraries imported
    limit_bytes_per_rank: int
    habits: Habits
    slack_factor: float = 1.0  # learned from runs on this machine
    saves_during_run: bool = False  # checkpoints are due before the run ends
    saves: bool = True  # a checkpoint is written at all


def memory_plan(card: ModelCard, arrangement: Arrangement, surroundings: Surroundings) -> MemoryPlan:
    """All phases of one rank."""
    habits = surroundings.habits
    parameters = parameter_bytes(card, arrangement)
    optimizer = optimizer_bytes(card, arrangement)
    moments = moments_of_step(card, arrangement, linear_copies_weight=habits.linear_copies_weight)

    def part(moment: Moment, *, optimizer: int = 0) -> MemoryPart:
        runtime = habits.runtime_bytes + (habits.gloo_bytes if arrangement.world_size > 1 else 0)
        whole_logits = moment.logits if moment.whole_logits else 0
        holes = habits.slack_bytes(state=parameters + optimizer, moving=moment.heap, whole_logits=whole_logits)
        return MemoryPart(
            parameters=parameters,
            gradients=moment.gradients,
            optimizer=optimizer,
            activations=moment.activations,
            logits=moment.logits,
            buffers=moment.buffers + moment.shared,
            data=DATA_BYTES,
            base=surroundings.base_bytes,
            slack=int(surroundings.slack_factor * (runtime + holes)),
        )

    worst = fullest(moments)
    # The optimizer's moments appear at the end of the first step, when the activations have gone.
    first_update = part(
        quiet_moment("update", card, arrangement, gradients=gradient_bytes(card, arrangement)), optimizer=optimizer
    )
    steady = part(worst, optimizer=optimizer)
    exporting = part(quiet_moment("export", card, arrangement, buffers=EXPORT_BYTES), optimizer=optimizer)
    largest = min(4 * card.largest_tensor_parameters, LOAD_SLICE_BYTES)
    return MemoryPlan(
        load=part(Moment(name="load", gradients=0, buffers=largest)),
        first_step=_larger(part(worst), first_update),
        steady_step=steady,
        checkpoint=_checkpoint(card, arrangement, surroundings, steady, exporting),
        limit=surroundings.limit_bytes_per_rank,
    )


def _checkpoint(
    card: ModelCard, arrangement: Arrangement, surroundings: Surroundings, steady: MemoryPart, exporting: MemoryPart
) -> MemoryPart:
    """A copy of a rank's part of the state is written while training goes on, where it fits; else nothing is copied."""
    copy = 12 * card.parameters // arrangement.world_size
    if not surroundings.saves or copy > surroundings.limit_bytes_per_rank - steady.total:
        return exporting
    beside = steady if surroundings.saves_during_run else exporting
    return replace(beside, buffers=beside.buffers + copy)


def parameter_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """fp32 weights; in bf16 a copy to compute with beside these masters, where it is not gathered for each use."""
    own = held_parameters(card, arrangement)
    has_copy = arrangement.engine == "replicate" or arrangement.through_memory
    return (6 if has_copy and arrangement.dtype == "bf16" else 4) * own


def optimizer_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Two fp32 moments."""
    return 8 * held_parameters(card, arrangement)


def _larger(one: MemoryPart, other: MemoryPart) -> MemoryPart:
    return max(one, other, key=lambda part: part.total)
