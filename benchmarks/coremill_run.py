"""coremill as a user runs it: a run file, `python -m coremill train`, and the folder it leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workload import SEQUENCE_LENGTH, Workload

RUN_FILE = """\
model: {model}
data:
  source: {documents}
  column: text
  sequence_length: {sequence_length}
train:
  steps: {steps}
  learning_rate: {learning_rate}
  schedule: {schedule}
  tokens_per_step: {tokens_per_step}
  seed: {seed}
run:
  folder: {run}
  export: false   # saving is measured for nobody
"""


def write_run_file(
    path: Path,
    work: Workload,
    *,
    run: Path,
    steps: int,
    tokens_per_step: int,
    seed: int,
    learning_rate: float = 2e-5,
    schedule: str = "linear",
) -> None:
    """A run file on the workload; engine, dtype, ranks and threads are left to coremill."""
    path.write_text(
        RUN_FILE.format(
            model=json.dumps(str(work.model.resolve())),
            documents=json.dumps(str(work.documents_file.resolve())),
            sequence_length=SEQUENCE_LENGTH,
            steps=steps,
            tokens_per_step=tokens_per_step,
            seed=seed,
            learning_rate=learning_rate,
            schedule=schedule,
            run=json.dumps(str(run.resolve())),
        )
    )


def train_command(run_file: Path, settings: Sequence[str] = ()) -> list[str]:
    """The documented command line."""
    command = [sys.executable, "-m", "coremill", "train", str(run_file)]
    for setting in settings:
        command += ["--set", setting]
    return command


def read_report(run: Path) -> dict[str, Any]:
    """RUN/report.json."""
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The step events of rank 0, in order."""
    lines = (run / "events" / "rank-00000.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.strip()]
    return [event for event in events if event["kind"] == "step"]


def wall_tokens_per_second(steps: Sequence[dict[str, Any]]) -> float | None:
    """Tokens of steps 2 to the end over the time between their events: the clock rule of the peers."""
    if len(steps) < 2:
        return None
    seconds = steps[-1]["time"] - steps[0]["time"]
    return sum(step["tokens"] for step in steps[1:]) / seconds if seconds > 0 else None
