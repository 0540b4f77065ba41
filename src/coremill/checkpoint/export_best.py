"""What a run exports in the end: the best step that is kept (`evaluation.keep_best`), else the weights as they are.

The best is read from its checkpoint by rank 0, once all ranks have hashed it together; of hosts that share no folder
each sends rank 0 its part first.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from coremill.checkpoint.export import ExportReport, export_model, export_trained
from coremill.checkpoint.export_adapter import AdapterExport
from coremill.checkpoint.export_checkpoint import writer_of
from coremill.checkpoint.fetch import all_files
from coremill.checkpoint.manifest import Checkpoint, PassedOver, Unusable, step_of
from coremill.checkpoint.resume import ResumePoint, survey_together, verified
from coremill.checkpoint.snapshot import CheckpointReader, Training
from coremill.model.source import ModelFolder
from coremill.train.numerics import EventSink
from coremill.train.scores import Scores
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT


@dataclass(frozen=True)
class Kept:
    """A checkpoint as rank 0 can read it."""

    checkpoint: Checkpoint
    fetched: Path | None  # a folder that was made for it


def export_chosen(
    training: Training,
    origin: ResumePoint,
    done: int,
    source: ModelFolder,
    tokenizer_folder: Path | None,
    destination: Path,
    *,
    world: World,
    dtype: torch.dtype,
    events: EventSink,
    adapters: AdapterExport | None = None,
    end_ids: Sequence[int] = (),
) -> tuple[ExportReport, str | None]:
    """After step `done`; every rank takes part. With the report comes the reason for the step in words, None where
    nothing was chosen. Of a run with `adapters` these, in fp32, or merged in the dtype of the base's files."""
    scores = training.scores
    best = _find_best(origin, done, scores, world, events) if scores.keeps_best else None
    places = (source, tokenizer_folder, destination)
    if best is not None:
        report = _export(best, *places, world=world, dtype=dtype, adapters=adapters, end_ids=end_ids)
    elif adapters is not None:
        report = export_trained(training.engine, training.model, adapters, *places, world=world, end_ids=end_ids)
    else:
        report = export_model(training.model, *places, world=world, dtype=dtype, end_ids=end_ids)
    if adapters is not None:
        events.write("choice", name="export", value=report.form.value, reason=report.form.reason)
    step = done if best is None else best.checkpoint.step
    if scores.keeps_best:
        report = replace(report, step=step)
    if not scores.keeps_best or not scores.metrics_of(step):
        return report, None
    return report, f"{'the best' if step == scores.best_step else 'the best that is kept'} ({scores.in_words(step)})"


def _find_best(origin: ResumePoint, done: int, scores: Scores, world: World, events: EventSink) -> Kept | None:
    """None: no checkpoint is better than the weights as they are, which are those of step `done`."""
    found = survey_together(origin.store.folder, world, origin.places)
    kept = {step_of(whole.name): whole for whole in found.whole}
    for step in scores.best_first({*kept, done}):
        if step == done:
            return None
        try:
            return Kept(*verified(origin.store, kept[step], _NEEDS[world.rank == 0], world, origin.places))
        except Unusable as error:
            passed = PassedOver(kept[step].name, str(error))
            events.write("passed_over", checkpoint=passed.name, reason=passed.reason, text=str(passed))
    return None


_NEEDS = {True: all_files, False: lambda manifest: ()}


def _export(
    best: Kept,
    source: ModelFolder,
    tokenizer: Path | None,
    destination: Path,
    *,
    world: World,
    dtype: torch.dtype,
    adapters: AdapterExport | None,
    end_ids: Sequence[int],
) -> ExportReport:
    started = time.perf_counter()
    with CheckpointReader(best.checkpoint) as reader:
        writer, form = writer_of(
            reader, source, tokenizer, dtype=dtype if adapters is None else None, adapters=adapters, end_ids=end_ids
        )
        if world.rank == 0:
            with HEARTBEAT.work("exporting", writer.total_bytes):
                writer.write(destination, HEARTBEAT.advance)
    world.barrier()
    if best.fetched is not None:
        shutil.rmtree(best.fetched, ignore_errors=True)
    seconds = time.perf_counter() - started
    return ExportReport(destination, writer.total_bytes, seconds, tuple(writer.files), form=form)
