"""MLflow: the server of MLFLOW_TRACKING_URI, or a database of its own in RUN/trackers/mlflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from coremill.hardware.probe import environment_snapshot
from coremill.report.readers.trackers.base import About, Opened, Point, Tracker, flat, plan_in_short

EXPERIMENT = "coremill"
MOST_METRICS, MOST_OTHERS, LONGEST = 1000, 100, 500  # in one request; characters of a value
PARENT = "mlflow.parentRunId"  # by which MLflow shows a run below another
STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


class MlflowTracker(Tracker):
    """One run of MLflow. A value cannot be taken back there, so what is done again is not told again.

    A run that goes on another way from an earlier step is another one there, a child of the first.
    """

    can_branch = True

    def __init__(self) -> None:
        self._client: MlflowClient
        self._run_id: str | None = None

    def open(self, about: About, folder: Path, run_id: str | None) -> Opened:
        """Begin a run, or set the earlier one running again."""
        folder.mkdir(parents=True, exist_ok=True)
        address = environment_snapshot().get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=address or f"sqlite:///{folder}/mlflow.db")
        run_id = run_id or self._run_id  # the latter: of an attempt to open that failed later
        if run_id is None:
            experiment = self._experiment(None if address else folder)
            run_id = str(self._client.create_run(experiment, run_name=about.name).info.run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        return self._describe(about, run_id, folder, address)

    def branch(self, about: About, folder: Path) -> Opened:
        """What was told of later steps stays where it is, and says so."""
        former = self._client.get_run(self._run_id)
        aside = f"set aside after step {about.from_step}"
        self._client.set_tag(former.info.run_id, "coremill.state", aside)
        self._client.set_terminated(former.info.run_id, status="KILLED")
        tags = {PARENT: former.data.tags.get(PARENT, former.info.run_id), "coremill.from_step": str(about.from_step)}
        made = self._client.create_run(former.info.experiment_id, run_name=about.name, tags=tags)
        address = environment_snapshot().get("MLFLOW_TRACKING_URI")
        return self._describe(about, str(made.info.run_id), folder, address)

    def _describe(self, about: About, run_id: str, folder: Path, address: str | None) -> Opened:
        """Config, plan and hardware; the run is ours from here on."""
        self._run_id = run_id
        has = set(self._client.get_run(run_id).data.params)  # one that is set cannot be set to another value
        params = [Param(key, str(value)[:LONGEST]) for key, value in flat(about.config).items() if key not in has]
        known = {f"plan.{key}": value for key, value in plan_in_short(about.plan).items()}
        known |= {f"hardware.{key}": value for key, value in about.hardware.items()}
        tags = [RunTag(key, str(value)[:LONGEST]) for key, value in known.items()]
        for part in _parts(params, MOST_OTHERS):
            self._client.log_batch(run_id, params=part)
        for part in _parts(tags, MOST_OTHERS):
            self._client.log_batch(run_id, tags=part)
        look = address or f"{folder}/mlflow.db; to look: mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db"
        return Opened(run_id, look, {kind: self._newest(f"{kind}/loss") for kind in ("train", "eval")})

    def _newest(self, name: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._run_id, name)), default=0)

    def _experiment(self, own_folder: Path | None) -> str:
        name = environment_snapshot().get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return str(known.experiment_id)
        artifacts = None if own_folder is None else (own_folder / "artifacts").as_uri()
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def log(self, points: Sequence[Point]) -> None:
        """In as few requests as there can be."""
        metrics = [
            Metric(name, number, int(point.time * 1000), point.step)
            for point in points
            for name, number in point.numbers.items()
        ]
        for part in _parts(metrics, MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    def note(self, lines: Sequence[str], step: int) -> None:
        """As the description of the run."""
        self._client.set_tag(self._run_id, "mlflow.note.content", "\n".join(f"- {line}" for line in lines))

    def close(self, summary: Mapping[str, Any]) -> None:
        """With the status that MLflow has for it."""
        self._client.set_tag(self._run_id, "coremill.state", str(summary.get("state")))
        self._client.set_terminated(self._run_id, status=STATUS.get(str(summary.get("state")), "FAILED"))


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))
