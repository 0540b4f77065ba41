"""Weights & Biases: online where there is a login, else offline in RUN/trackers/wandb, to be synced later.

WANDB_* variables hold as everywhere: project, entity, mode, folder, id.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from coremill.hardware.probe import environment_snapshot
from coremill.report.readers.trackers.base import About, Opened, Point, Tracker

PROJECT = "coremill"
FIGURES = ("state", "exit_code", "steps", "seconds", "tokens_per_second", "utilization", "loss_last", "goodput")


class WandbTracker(Tracker):
    """One run of W&B, continued by its id; its steps only rise, so what is done again is not told again.

    A run that goes on another way from an earlier step is another one there, in the same group.
    """

    can_branch = True

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, about: About, folder: Path, run_id: str | None) -> Opened:
        """Go on with a run, or begin one."""
        named = environment_snapshot().get("WANDB_RUN_ID") if about.from_step is None else None
        return self._start(about, folder, named or run_id or _new_id())

    def branch(self, about: About, folder: Path) -> Opened:
        """What was told of later steps stays where it is, and says so."""
        if self._run is not None:
            self._run.summary.update({"run/state": f"set aside after step {about.from_step}"})
            self._run.finish()
            self._run = None
        return self._start(about, folder, _new_id())

    def _start(self, about: About, folder: Path, run_id: str) -> Opened:
        """Online, or offline where W&B refuses: without a login the numbers are kept, not lost."""
        why = ""
        try:
            self._run = self._begin(about, folder, run_id, None)
        except wandb.errors.Error as error:
            why = f" ({' '.join(str(error).split())})"
            self._run = self._begin(about, folder, run_id, "offline")
        if self._run.settings.mode == "online":
            return Opened(run_id, str(self._run.url))
        files = Path(self._run.settings.sync_dir).parent / f"offline-run-*-{run_id}"  # one of each continuation
        return Opened(run_id, f"offline{why}; to send it: wandb login, then wandb sync {files}")

    def _begin(self, about: About, folder: Path, run_id: str, mode: Any) -> Any:
        environ = environment_snapshot()
        return wandb.init(
            project=environ.get("WANDB_PROJECT") or PROJECT,
            name=(environ.get("WANDB_NAME") if about.from_step is None else None) or about.name,
            group=environ.get("WANDB_RUN_GROUP") or about.group,
            id=run_id,
            resume="allow",
            dir=environ.get("WANDB_DIR") or str(folder),
            mode=mode,
            config={**about.config, "plan": dict(about.plan), "hardware": dict(about.hardware)},
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, points: Sequence[Point]) -> None:
        """Numbers of the same step become one row."""
        for point in points:
            self._run.log(dict(point.numbers), step=point.step)

    def note(self, lines: Sequence[str], step: int) -> None:
        """As the notes of the run."""
        self._run.notes = "\n".join(f"- {line}" for line in lines)

    def close(self, summary: Mapping[str, Any]) -> None:
        """The headline figures as the run's summary."""
        self._run.summary.update({f"run/{key}": summary[key] for key in FIGURES if summary.get(key) is not None})
        self._run.finish(exit_code=int(summary.get("exit_code") or 0))


def _new_id() -> str:
    return uuid.uuid4().hex[:8]
