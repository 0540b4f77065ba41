"""Trackers of other makers that follow a run: TensorBoard, Weights & Biases, MLflow, each through its own library.

A tracker lives in a process of its own (`child.py`) that reads the events of the run from their files, so the launcher
hands nothing over, step for step: `reader.py` only starts that process, says what it has to say, and ends it in time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from coremill.errors import InputError

TRACKERS_FOLDER = "trackers"  # in the run folder


@dataclass(frozen=True)
class TrackerKind:
    """Where a tracker is found, and what has to be installed for it."""

    implementation: str  # module:class, imported in the tracker's own process only
    libraries: tuple[str, ...]


_HERE = "coremill.report.readers.trackers"
TRACKERS = {
    "tensorboard": TrackerKind(f"{_HERE}.to_tensorboard:TensorBoardTracker", ("tensorboard",)),
    "wandb": TrackerKind(f"{_HERE}.to_wandb:WandbTracker", ("wandb",)),
    "mlflow": TrackerKind(f"{_HERE}.to_mlflow:MlflowTracker", ("mlflow", "sqlalchemy", "alembic")),
}


def require_libraries(trackers: Sequence[str]) -> None:
    """Refuse a tracker whose library is not installed; none is imported."""
    for name in trackers:
        missing = [library for library in TRACKERS[name].libraries if not _is_installed(library)]
        if missing:
            raise InputError(
                f"the tracker {name} is not installed here",
                where="run.trackers",
                why=f"there is no module {' and no module '.join(missing)} in this Python",
                do=f"pip install 'coremill[{name}]', or leave {name} out of run.trackers",
            )


def _is_installed(library: str) -> bool:
    """A folder of that name where the command runs (wandb leaves one) is no library: it has no file of its own."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None
