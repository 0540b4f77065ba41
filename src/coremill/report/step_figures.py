"""What a run came to up to one of its steps: of a step that is exported before the last, or while the run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coremill.report.events import iter_events
from coremill.report.summary import read_plan
from coremill.report.tally import RunTally


@dataclass(frozen=True)
class StepFigures:
    """One step, and what was done to get there."""

    step: int
    tokens: int  # of all steps up to it
    loss: float | None  # of this step's batch; None where its numbers were left out


def figures_at(run_folder: Path, step: int) -> StepFigures:
    """From the events; steps that were set aside do not count."""
    tally = RunTally(read_plan(run_folder))
    for event in iter_events(run_folder):
        if event.kind in ("start", "step", "set_aside"):
            tally.add(event)
    tokens = sum(int(record.tokens) for each, record in tally.steps.items() if each <= step)
    own = tally.steps.get(step)
    return StepFigures(step, tokens, None if own is None or own.skipped else own.loss)
