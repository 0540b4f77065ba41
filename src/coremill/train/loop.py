"""The training loop as a generator of step results: saving, showing and evaluating happen outside it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from coremill.config.schema import TrainSection
from coremill.data.loader import Batch, RowLoader
from coremill.errors import NonFinite
from coremill.parallel.engine import Engine
from coremill.parallel.exchange import CollectiveUse
from coremill.train.optimizer import learning_rate_at


class Task(Protocol):
    """What a loss is."""

    def loss(self, module: nn.Module, batch: Batch, scale: float) -> torch.Tensor:
        """Sum over the batch's valid targets times scale."""


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
    collectives: dict[str, CollectiveUse]  # the same by kind, with seconds on the wire and seconds not hidden


def train_steps(
    engine: Engine,
    task: Task,
    loader: RowLoader,
    optimizer: torch.optim.Optimizer,
    settings: TrainSection,
    *,
    steps: int,
    first_step: int = 1,
    agreement: Agreement | None = None,
) -> Iterator[StepResult]:
    """Run steps first_step..steps, yielding each one's numbers."""
    for step in range(first_step, steps + 1):
        began = time.perf_counter()
        work = loader.next_step()
        have_data = time.perf_counter()

        scale = 1.0 / work.valid_targets
        loss = 0.0
        for index, batch in enumerate(work.batches):
            loss += engine.forward_backward(
                lambda module, batch=batch, scale=scale: task.loss(module, batch, scale),  # type: ignore[misc]
                is_last=index == len(work.batches) - 1,
            )
        totals = engine.reduce(loss, agreement.votes(step) if agreement else ())
        have_gradients = time.perf_counter()
        if not (math.isfinite(totals.loss) and math.isfinite(totals.gradient_norm)):
            # Every rank holds the same totals, so all stop here, with the weights as they were.
            raise NonFinite(
                f"step {step}: the loss is {totals.loss}, the gradient norm {totals.gradient_norm}",
                why="the weights were left as they were before this step",
                do="lower train.learning_rate, set train.clip_norm, or look at the rows "
                + ", ".join(str(row) for row in work.row_ids[:8]),
            )

        if settings.clip_norm is not None and totals.gradient_norm > settings.clip_norm:
            engine.scale_gradients(settings.clip_norm / totals.gradient_norm)
        learning_rate = learning_rate_at(step, steps, settings)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        engine.after_step()
        if agreement:
            agreement.hear(totals.votes)
        ended = time.perf_counter()

        wire = engine.wire_use()
        yield StepResult(
            step=step,
            loss=totals.loss,
            learning_rate=learning_rate,
            gradient_norm=totals.gradient_norm,
            tokens=work.tokens,
            padding_tokens=work.padding_tokens,
            seconds=ended - began,
            data_seconds=have_data - began,
            compute_seconds=have_gradients - have_data - wire.exposed_seconds,
            communication_seconds=wire.exposed_seconds,
            optimizer_seconds=ended - have_gradients,
            wire_bytes=wire.bytes_sent,
            collectives=wire.collectives,
        )


def evaluation_loss(engine: Engine, task: Task, batches: Iterable[Batch], valid_targets: int) -> float:
    """This rank's part of the mean loss over the evaluation rows; the parts of all ranks add up to it."""
    module = engine.module
    module.eval()
    try:
        with torch.no_grad():
            return sum(float(task.loss(module, batch, 1.0 / valid_targets)) for batch in batches)
    finally:
        module.train()
