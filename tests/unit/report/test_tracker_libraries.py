"""TensorBoard, W&B and MLflow give back, through their own libraries, the numbers that are in the events."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coremill.report.events import read_events
from coremill.report.readers.trackers import TRACKERS
from coremill.report.readers.trackers.child import Delivery
from unit.report.fake_run import START, make_fake_run, write_line

STEPS = 51  # with an evaluation after 50
Series = dict[str, list[tuple[int, float]]]


def deliver(run: Path, name: str, summary: dict[str, Any], *, branches: bool = False) -> str:
    """What the process of a tracker does, in this one; gives the words for the screen."""
    module = pytest.importorskip(f"coremill.report.readers.trackers.to_{name}", reason=f"{name} is not installed")
    said: list[dict[str, Any]] = []
    tracker = getattr(module, TRACKERS[name].implementation.partition(":")[2])()
    Delivery(tracker, name, run, lambda kind, **values: said.append({"kind": kind, **values})).run(lambda _: summary)
    expected = ["ready", *(["branched"] if branches else []), "delivered", "done"]
    assert [one["kind"] for one in said] == expected, said
    return str(said[int(branches)]["words"])


def of_tensorboard(run: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "trackers" / "tensorboard"), {"scalars": 0}).Reload()
    return {name: [(one.step, one.value) for one in read.Scalars(name)] for name in read.Tags()["scalars"]}


def wandb_records(run: Path) -> list[Any]:
    """The records of all files of the run in their own format, which W&B has no Python reader for: a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted((run / "trackers" / "wandb").glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # no header fits into the rest of a block
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                found.append(Record.FromString(whole))
                whole = b""
    return found


def of_wandb(run: Path) -> Series:
    series: Series = {}
    for record in wandb_records(run):
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name in row:
            if "/" in name:
                series.setdefault(name, []).append((int(row["_step"]), row[name]))
    return series


def of_mlflow(run: Path) -> Series:
    client, found = mlflow_run(run)
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return {name: [(one.step, one.value) for one in history] for name, history in histories.items()}


def mlflow_run(run: Path) -> tuple[Any, Any]:
    client, runs = mlflow_runs(run)
    assert len(runs) == 1
    return client, runs[0]


def mlflow_runs(run: Path) -> tuple[Any, list[Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run}/trackers/mlflow/mlflow.db")
    return client, list(client.search_runs([client.get_experiment_by_name("coremill").experiment_id]))


READERS: dict[str, Callable[[Path], Series]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
}


def series_of(name: str, run: Path) -> Series:
    """Up to the last step of the run: W&B writes in a process of its own, which ends later."""
    last = [event for event in read_events(run) if event.kind == "step" and event.rank == 0][-1].get("step")
    deadline = time.monotonic() + 120
    while (series := READERS[name](run)).get("train/loss", [(0, 0.0)])[-1][0] != last and time.monotonic() < deadline:
        time.sleep(0.1)
    return series


def write_step(run: Path, time: float, step: int, loss: float, rate: float) -> None:
    numbers = {"loss": loss, "learning_rate": rate, "gradient_norm": 0.5, "tokens": 8176, "seconds": 2.0}
    write_line(run, 0, "step", time, step=step, **numbers, rss_bytes=5e8)


@pytest.fixture(scope="module", params=READERS)
def tracked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that was stopped after 51 steps and went on from a checkpoint of step 49, in the care of one tracker."""
    name, run = request.param, tmp_path_factory.mktemp(request.param) / "run"
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_MODE", "WANDB_NAME"):
            patch.delenv(variable, raising=False)
        for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
            patch.delenv(variable, raising=False)
        patch.setenv("HOME", str(run.parent))  # no login of who runs the tests
        patch.setenv("NETRC", str(run.parent / "netrc"))
        make_fake_run(run, steps=STEPS, ending="stopped")
        write_line(run, 1, "fault", START + 1e5, text="rank 1 was killed", step=51, action="restart")
        words = deliver(run, name, {"state": "stopped", "exit_code": 75})
        first = {(event.kind, event.get("step")): event for event in read_events(run) if event.rank == 0}
        time.sleep(1.1)  # W&B and TensorBoard name their files by the second
        for step in range(50, 54):
            rate = first["step", step].get("learning_rate") if step < 52 else 1e-4
            write_step(run, START + 1e6 + step, step, 1.0 / step, rate)
        deliver(run, name, {"state": "finished", "exit_code": 0, "loss_last": 1.0 / 53})
    return name, run, words, first


def test_numbers_are_those_of_the_events(tracked: Any) -> None:
    name, run, _, first = tracked
    series = series_of(name, run)
    # What TensorBoard is told again replaces what it had; the others keep what they had.
    last_of_first = 49 if name == "tensorboard" else 51
    for kind, field in {"loss": "loss", "learning_rate": "learning_rate", "grad_norm": "gradient_norm"}.items():
        expected = {step: first["step", step].get(field) for step in range(1, last_of_first + 1)}
        again = {event.get("step"): event.get(field) for event in read_events(run) if event.time > START + 1e6}
        expected |= {step: again[step] for step in range(last_of_first + 1, 54)}
        same = (lambda value: pytest.approx(value, rel=1e-6)) if name == "tensorboard" else (lambda value: value)
        assert series[f"train/{kind}"] == [(step, same(value)) for step, value in expected.items()]
    assert [step for step, _ in series["train/tokens_per_second"]][:3] == [2, 3, 4]
    assert series["train/memory_bytes_per_rank"] and series["train/utilization"]
    if name != "tensorboard":  # it forgot the evaluation of step 50 with the steps after 49
        assert series["eval/loss"] == [(50, first["evaluation", 50].get("loss"))]
        assert series["eval/perplexity"] == [(50, first["evaluation", 50].get("perplexity"))]


def test_config_plan_hardware_and_faults_go_along(tracked: Any) -> None:
    name, run, words, _ = tracked
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(run / "trackers" / name)).Reload()
        texts = {
            tag: read.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in ("config", "plan", "hardware")
        }
        notes = read.Tensors("notes")[-1].tensor_proto.string_val[0].decode()
        assert "sequence_length: 512" in texts["config"] and "| engine | shard |" in texts["plan"]
        assert "cpu_model" in texts["hardware"] and "_hparams_/session_start_info" in read.summary_metadata
        assert f"tensorboard --logdir {run}/trackers/tensorboard" in words
    elif name == "mlflow":
        _, found = mlflow_run(run)
        assert found.data.params["data.sequence_length"] == "512" and found.data.tags["plan.engine"] == "shard"
        assert found.data.tags["hardware.cpu_model"] and found.info.run_name == "run"
        assert (found.info.status, found.data.tags["coremill.state"]) == ("FINISHED", "finished")
        notes = found.data.tags["mlflow.note.content"]
        assert f"mlflow ui --backend-store-uri sqlite:///{run}/trackers/mlflow/mlflow.db" in words
    else:
        records = wandb_records(run)
        runs = [record.run for record in records if record.HasField("run")]
        ids = {one.run_id for one in runs}
        config = {update.key: update.value_json for one in runs for update in one.config.update}
        assert len(ids) == 1 and {one.display_name for one in runs} == {"run"}
        assert json.loads(config["data"])["sequence_length"] == 512 and {"plan", "hardware"} <= set(config)
        assert f"wandb sync {run}/trackers/wandb/wandb/offline-run-*-{ids.pop()}" in words
        assert "offline (No API key configured" in words
        notes = [one.notes for one in runs if one.notes][-1]
    assert "after step 51: rank 1 was killed (restart)" in notes and "ended: ended on request" in notes


@pytest.mark.parametrize("why", ["--from", "another rate"])
def test_another_way_from_an_earlier_step_takes_nothing_back_and_is_told_apart(
    tracked: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard forgets what was left; W&B and MLflow, which cannot, get a run beside the first."""
    name, begun, *_ = tracked
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    before = series_of(name, run)["train/loss"]
    time.sleep(1.1)  # W&B and TensorBoard name their files by the second
    if why == "--from":
        write_line(run, 0, "set_aside", START + 2e6, after_step=51, steps=[53], folder="aside")
        write_line(run, 0, "evaluation", START + 2e6 + 1, step=51, loss=3.0, perplexity=9.0, tokens=5, seconds=0.1)
    for step in (52, 53, 54):
        write_step(run, START + 2e6 + step, step, 2.0 / step, 1e-4 if why == "--from" else 5e-5)
    words = deliver(run, name, {"state": "finished", "exit_code": 0}, branches=name != "tensorboard")
    after = [(step, pytest.approx(2.0 / step)) for step in (52, 53, 54)]
    if name == "tensorboard":
        series = of_tensorboard(run)
        assert series["train/loss"] == [*(one for one in before if one[0] <= 51), *after]
        assert why == "another rate" or series["eval/loss"][-1] == (51, 3.0)
        return
    assert words.startswith("a new run, run-from-step-51, for the run goes on from step 51 another way: ")
    if name == "mlflow":
        client, runs = mlflow_runs(run)
        by_name = {one.info.run_name: one for one in runs}
        first, branch = by_name["run"], by_name["run-from-step-51"]
        assert branch.data.tags["mlflow.parentRunId"] == first.info.run_id
        assert first.data.tags["coremill.state"] == "set aside after step 51"
        assert (branch.info.status, branch.data.tags["coremill.from_step"]) == ("FINISHED", "51")
        histories = [client.get_metric_history(one.info.run_id, "train/loss") for one in (first, branch)]
        told = [[(metric.step, metric.value) for metric in history] for history in histories]
    else:
        deadline = time.monotonic() + 120  # W&B writes in a process of its own
        while len(of_wandb(run)["train/loss"]) < len(before) + len(after) and time.monotonic() < deadline:
            time.sleep(0.1)
        records = wandb_records(run)
        runs = [record.run for record in records if record.HasField("run")]
        assert {one.display_name for one in runs} == {"run", "run-from-step-51"} and len(
            {one.run_id for one in runs}
        ) == 2
        assert {one.run_group for one in runs} == {"run"}
        whole = of_wandb(run)["train/loss"]
        told = [whole[: len(before)], whole[len(before) :]]
    assert told == [before, after]
    # What comes later goes on in the new run.
    time.sleep(1.1)
    write_step(run, START + 3e6, 55, 1.0, 1e-5)
    deliver(run, name, {"state": "finished", "exit_code": 0})
    progress = json.loads((run / "trackers" / f"{name}.json").read_text())
    assert progress["from_step"] == 51 and progress["done"]["train"] == 55
    if name == "mlflow":
        client, runs = mlflow_runs(run)
        assert len(runs) == 2 and client.get_metric_history(branch.info.run_id, "train/loss")[-1].step == 55
