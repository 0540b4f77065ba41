"""Bytes per rank, phase by phase and part by part.

What is alive is counted exactly: weights, gradients, optimizer state and the points at which a step may hold most by
the engine (engines/*/cost.py), what a layer keeps in plan/activations.py. What the process takes besides (its
libraries, threads, and what the allocator keeps of freed memory) is measured: the base by calibration, the rest in
plan/allocator.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coremill.plan.allocator import Allocator, BaseSlack
from coremill.plan.card import ModelCard
from coremill.plan.engine_cost import cost_of
from coremill.plan.peak import StepPoint, possible_peaks
from coremill.plan.types import Arrangement, MemoryPart, MemoryPlan

MIB = 2**20

# Rows are memory-mapped and a batch is small: the loader, its index, and pages in use.
DATA_BYTES = 4 * MIB
# A slice on its way from file to parameter; asked for in parts of this (model/read.py).
LOAD_SLICE_BYTES = 64 * MIB
# A piece of a tensor on its way to a file (checkpoint/export.py): as it came from another rank, and
# cast, while the one before is still there.
EXPORT_PIECE_BYTES = 8 * MIB
EXPORT_BYTES = 3 * EXPORT_PIECE_BYTES
# Weights and moments of fp32 AdamW, to which the holes were fitted, beside its gradients.
HOLES_OF_GRADIENTS = 3


@dataclass(frozen=True, kw_only=True)
class MemoryContext:
    """What memory depends on besides model and arrangement."""

    base_bytes: int  # an interpreter with the libraries imported
    limit_bytes_per_rank: int
    allocator: Allocator
    slack_factor: float = 1.0  # learned from runs on this machine
    saves_during_run: bool = False  # checkpoints are due before the run ends
    saves: bool = True  # a checkpoint is written at all


def memory_plan(card: ModelCard, arrangement: Arrangement, context: MemoryContext) -> MemoryPlan:
    """All phases of one rank."""
    allocator, cost = context.allocator, cost_of(arrangement)
    state = cost.state(card, arrangement)

    def part(point: StepPoint, *, optimizer: int = state.optimizer) -> MemoryPart:
        runtime = allocator.runtime_bytes + (allocator.gloo_bytes if arrangement.world_size > 1 else 0)
        runtime += allocator.differing_rows_bytes if arrangement.is_padded else 0
        whole_logits = point.logits if point.whole_logits else 0
        moved = state.parameters - state.base + optimizer
        if optimizer:  # it came while gradients stood, whose holes stay as large where weights and moments are small
            moved = max(moved, HOLES_OF_GRADIENTS * min(point.gradients, state.gradients))
        holes = allocator.slack_bytes(
            state=moved, moving=point.heap, whole_logits=whole_logits, base=_base_slack(card, arrangement, state.base)
        )
        return MemoryPart(
            parameters=state.parameters,
            gradients=point.gradients,
            optimizer=optimizer,
            activations=point.activations,
            logits=point.logits,
            buffers=point.buffers + point.shared,
            data=DATA_BYTES,
            base=context.base_bytes,
            slack=int(context.slack_factor * (runtime + holes)),
        )

    points = cost.step_points(card, arrangement, linear_copies_weight=allocator.linear_copies_weight)
    peak = max(possible_peaks(points), key=lambda point: part(point).total)
    waiting = cost.between_steps(card, arrangement)
    steady = part(peak)
    # The optimizer's state appears at the end of the first step, when the activations have gone.
    first_step = (part(peak, optimizer=0), part(replace(waiting, gradients=state.gradients)))
    exporting = part(replace(waiting, buffers=waiting.buffers + EXPORT_BYTES))
    largest = min(4 * card.largest_tensor_parameters, LOAD_SLICE_BYTES)
    saved_bytes_per_rank = cost.saved_bytes(card, arrangement) // arrangement.world_size
    return MemoryPlan(
        load=part(StepPoint(name="load", gradients=0, buffers=largest), optimizer=0),
        first_step=max(first_step, key=lambda part: part.total),
        steady_step=steady,
        checkpoint=_checkpoint(saved_bytes_per_rank, context, steady, exporting),
        limit=context.limit_bytes_per_rank,
    )


def _base_slack(card: ModelCard, arrangement: Arrangement, base_bytes: int) -> BaseSlack | None:
    if card.adapters is None:
        return None
    return BaseSlack(
        bytes=base_bytes,
        hole_bytes=card.adapters.hole_bytes,
        has_dropout=card.adapters.has_dropout,
        recomputes=arrangement.activation_checkpointing,
    )


def _checkpoint(copy: int, context: MemoryContext, steady: MemoryPart, exporting: MemoryPart) -> MemoryPart:
    """A copy of a rank's part of the state is written while training goes on, where it fits; else nothing is copied."""
    if not context.saves or copy > context.limit_bytes_per_rank - steady.total:
        return exporting
    beside = steady if context.saves_during_run else exporting
    return replace(beside, buffers=beside.buffers + copy)
