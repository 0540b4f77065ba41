"""The training loop as a generator of step results: saving, showing and evaluating happen outside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from coremill.config.schema import TrainSection
from coremill.data.loader import Loader, StepBatches
from coremill.engines.base import Engine, MovesInside, StepTotals
from coremill.engines.wire.exchange import CollectiveUse, Kind
from coremill.errors import NonFinite
from coremill.tasks.base import TrainingTask
from coremill.train.clipping import EarlierNorms
from coremill.train.numerics import NumericsGuard, moved_inside
from coremill.train.schedule import learning_rate_at
from coremill.train.watched_step import WATCHED_STEP, watched
from coremill.world.heartbeat import HEARTBEAT


class Agreement(Protocol):
    """Something ranks agree on every step, inside the exchange that a step makes anyway (stopping, saving)."""

    def votes(self, step: int) -> Sequence[float]:
        """What this rank says in this step; always equally many numbers."""

    def hear(self, totals: Sequence[float]) -> None:
        """The same numbers added up over all ranks."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, in plain numbers."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int  # real ones, of all ranks
    padding_tokens: int
    seconds: float
    data_seconds: float
    compute_seconds: float
    communication_seconds: float  # not hidden behind compute
    optimizer_seconds: float
    wire_bytes: int  # sent by this rank
    collectives: dict[Kind, CollectiveUse]  # the same by kind, with seconds on the wire and seconds not hidden
    skipped: bool = False  # its loss or norm was not finite: the optimizer did not see it
    watched_seconds: dict[str, float] | None = None  # of products and of attention, where it was watched


def train_steps(
    engine: Engine,
    task: TrainingTask[Any, Any],
    loader: Loader[Any],
    settings: TrainSection,
    *,
    steps: int,
    first_step: int = 1,
    agreement: Agreement | None = None,
    guard: NumericsGuard | None = None,
    norms: EarlierNorms | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[StepResult]:
    """Run steps first_step..steps, yielding each one's numbers; without a guard one that is not finite ends it.

    `is_over` is asked before each step: whether the run ends here all the same.
    """
    inside = engine if isinstance(engine, MovesInside) and engine.moves_inside else None
    norms = norms or EarlierNorms()
    for step in range(first_step, steps + 1):
        if is_over():
            break
        HEARTBEAT.step(step)
        began = time.perf_counter()
        work = loader.next_step()
        have_data = time.perf_counter()

        scale = 1.0 / work.valid_targets
        learning_rate = learning_rate_at(step, steps, settings)
        if inside is not None:
            inside.begin_step(learning_rate, norms.factor(settings.clip_norm))
        with watched(step - first_step + 1 == WATCHED_STEP) as watch:
            losses = []
            for index, batch in enumerate(work.batches):
                HEARTBEAT.mark()
                losses.append(
                    engine.forward_backward(
                        lambda module, batch=batch, scale=scale: task.loss(module, batch, scale),  # type: ignore[misc]
                        is_last=index == len(work.batches) - 1,
                    )
                )
            totals = engine.reduce(sum(losses), agreement.votes(step) if agreement else ())
            have_gradients = time.perf_counter()
        updating = time.perf_counter()
        if totals.is_finite:
            engine.step(learning_rate, settings.clip_norm)
            norms.add(totals.gradient_norm)
        else:
            engine.skip_step()
            if inside is not None and math.isfinite(totals.loss):
                raise moved_inside(step, totals, guard)
            _judge(step, engine, task, work, losses, totals, guard)
        if agreement:
            agreement.hear(totals.votes)
        ended = time.perf_counter()
        HEARTBEAT.step_done(step)

        wire = engine.wire_use()
        moving_seconds = 0.0 if inside is None else inside.take_moving_seconds()
        compute_seconds = have_gradients - have_data - wire.exposed_seconds - moving_seconds
        optimizer_seconds = ended - updating + moving_seconds
        yield StepResult(
            step=step,
            loss=totals.loss,
            learning_rate=learning_rate,
            gradient_norm=totals.gradient_norm,
            tokens=work.tokens,
            padding_tokens=work.padding_tokens,
            seconds=ended - began,
            data_seconds=have_data - began,
            compute_seconds=compute_seconds,
            communication_seconds=wire.exposed_seconds,
            optimizer_seconds=optimizer_seconds,
            wire_bytes=wire.bytes_sent,
            collectives=wire.collectives,
            skipped=not totals.is_finite,
            watched_seconds=None if watch is None else watch.seconds,
        )
    HEARTBEAT.enter("finish")


def _judge(
    step: int,
    engine: Engine,
    task: TrainingTask[Any, Any],
    work: StepBatches[Any],
    losses: Sequence[float],
    totals: StepTotals,
    guard: NumericsGuard | None,
) -> None:
    """Skip a step whose numbers are not finite, or end the run; gradients are dropped, weights are as they were."""
    if guard is None:
        raise NonFinite(f"step {step}: the loss is {totals.loss}, the gradient norm {totals.gradient_norm}")
    scale = 1.0 / work.valid_targets
    with torch.random.fork_rng(devices=()):  # looking again must not change the random numbers of later steps
        guard.judge_step(
            step,
            totals,
            work.batches,
            losses,
            lambda batch: engine.examine(lambda module: task.loss(module, batch, scale)),
        )
