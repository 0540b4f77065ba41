"""One evaluation: the loss of the rows that were held out, and the metrics that the task makes of it or of outputs.

Outputs, where a task has some, travel from all ranks to rank 0 and are put in the order of their rows there, so that
neither the number of ranks nor the order of batches is in the metrics.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from coremill.data.loader import FILLER, EvaluationBatches
from coremill.engines.base import Engine
from coremill.tasks.base import Metric, RowOutput, Rows, Scored, TrainingTask
from coremill.train.numerics import bad_rows
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT
from coremill.world.lost_peers import peer_errors


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found; the same on every rank but for `bad_rows` and `files`."""

    loss: float
    metrics: dict[str, float]
    bad_rows: list[int]  # of this rank: their loss is not a number
    files: Mapping[str, str] = field(default_factory=dict)  # to leave in the run folder; on rank 0


def evaluate_rows(
    engine: Engine,
    task: TrainingTask[Any, Any],
    rows: Rows,
    batches: EvaluationBatches[Any],
    metrics: Sequence[Metric],
    world: World,
) -> Evaluated:
    """Every rank calls it with its share of the batches."""
    part, bad, row_ids, outputs = _passes(engine, task, batches)
    loss = world.sum(part)
    gathered = _gather_outputs(world, row_ids, outputs)
    scored: Scored | None = None
    if gathered is not None and not math.isfinite(loss):  # outputs that are no numbers have a best one all the same
        scored = Scored({metric.name: math.nan for metric in metrics})
    elif gathered is not None:
        with _marks():
            scored = task.score(rows, *gathered)
    if scored is None and world.rank == 0:
        scored = Scored(dict(zip((metric.name for metric in metrics), task.metrics(loss), strict=True)))
    # CPUs may round differently: those of rank 0 are everybody's.
    found: dict[str, float] = world.broadcast(None if scored is None else dict(scored.metrics))
    return Evaluated(loss, found, bad, {} if scored is None else scored.files)


@contextlib.contextmanager
def _marks() -> Iterator[None]:
    """The body is one call that may take minutes, of many thousand questions; it is not stuck."""
    done = threading.Event()

    def mark() -> None:
        while not done.wait(1.0):
            HEARTBEAT.mark()

    thread = threading.Thread(target=mark, daemon=True, name="coremill-scoring")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _passes(
    engine: Engine, task: TrainingTask[Any, Any], batches: EvaluationBatches[Any]
) -> tuple[float, list[int], list[int], list[RowOutput]]:
    """This rank's part of the mean loss, its rows whose loss is not a number, its rows and their outputs.

    The parts of all ranks add up to the loss.
    """
    module = engine.module
    module.eval()
    kept: list[tuple[Any, float]] = []
    outputs: list[RowOutput] = []
    try:
        with torch.no_grad():
            for batch in batches:
                HEARTBEAT.mark()
                loss, found = task.evaluate(module, batch, 1.0 / batches.valid_targets)
                kept.append((batch, float(loss)))
                outputs += found
    finally:
        module.train()
    bad = bad_rows([batch for batch, _ in kept], [not math.isfinite(loss) for _, loss in kept])
    row_ids = [row for batch, _ in kept for row in batch.row_ids if row != FILLER]
    return sum(loss for _, loss in kept), bad, row_ids, outputs


def _gather_outputs(
    world: World, row_ids: Sequence[int], outputs: Sequence[RowOutput]
) -> tuple[list[int], list[RowOutput]] | None:
    """Rows and outputs of all ranks on rank 0, by row; None elsewhere, and where no rank has any."""
    lengths = [len(output) for output in outputs]
    if not any(told := world.gather(len(outputs))):
        return None
    mine = np.concatenate([np.zeros(0, np.float32), *outputs]).astype(np.float32)
    counts = torch.tensor([row_ids[: len(outputs)], lengths], dtype=torch.int64)
    if world.rank != 0:
        with peer_errors():
            dist.send(counts, 0)
            dist.send(torch.from_numpy(mine), 0)
        return None
    found = dict(zip(row_ids, outputs, strict=True))
    for rank in range(1, world.size):
        HEARTBEAT.mark()
        with peer_errors():
            counts = torch.empty((2, told[rank]), dtype=torch.int64)
            dist.recv(counts, rank)
            values = torch.empty(int(counts[1].sum()), dtype=torch.float32)
            dist.recv(values, rank)
        parts = np.split(values.numpy(), np.cumsum(counts[1].numpy())[:-1]) if told[rank] else []
        found |= dict(zip(counts[0].tolist(), parts, strict=True))
    ordered = sorted(found)
    return ordered, [found[row] for row in ordered]
