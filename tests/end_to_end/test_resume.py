"""One run, interrupted in every way it can be, against the same run left in peace: the same losses and weights."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from end_to_end.scene import DEADLINE_SECONDS, Ended, Scene

TRAIN = [sys.executable, "-m", "coremill", "train", "run.yaml", "--nproc", "2"]
WITHOUT_END = 1_000_000


def in_folder(name: str, steps: int, *settings: str) -> list[str]:
    """With a constant learning rate, so that a step is the same wherever the end is."""
    words = [f"run.folder={name}", f"train.steps={steps}", "train.schedule=constant", "checkpoint.every=10steps"]
    return [*TRAIN, *(word for setting in [*words, *settings] for word in ("--set", setting))]


def events(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    lines = (folder / "events" / f"rank-{rank:05d}.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def losses(folder: Path) -> dict[int, float]:
    """By step; of a step that was done twice, the last."""
    return {event["step"]: event["loss"] for event in events(folder) if event["kind"] == "step"}


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "export" / "model.safetensors").read_bytes()).hexdigest()


def random_states(folder: Path) -> set[bytes]:
    """Those of all ranks in the newest checkpoint; this model draws no numbers, so they are where the run began."""
    files = max((folder / "checkpoints").glob("step-*")).glob("rank-*")
    return {load_file(file)["rng/torch"].tobytes() for file in files}


def interrupted(scene: Scene, folder: Path, by: Callable[[int, list[int]], None], *, after_steps: int) -> Ended:
    """Start or go on, and call `by` with the launcher's and the ranks' process ids once so many more steps are done."""
    known = folder / "events" / "rank-00000.jsonl"
    already = len(events(folder)) if known.exists() else 0
    running = scene.start(in_folder(folder.name, WITHOUT_END, "supervise.restart=false"))
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        new = events(folder)[already:] if known.exists() else []
        if sum(event["kind"] == "step" for event in new) >= after_steps:
            break
        if running.process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(str(running.end()))
        time.sleep(0.05)
    starts = [[event for event in events(folder, rank) if event["kind"] == "start"][-1] for rank in (0, 1)]
    by(running.process.pid, [start["pid"] for start in starts])
    return running.end()


def test_stopped_killed_and_damaged_the_run_ends_with_the_same_bits(scene: Scene) -> None:
    folder = scene.path("war")

    # One rank alone is asked: all save the same step.
    done = interrupted(scene, folder, lambda _, ranks: os.kill(ranks[1], signal.SIGTERM), after_steps=5)
    assert done.code == 75 and not done.left, str(done)
    assert "which is saved" in done.out and "the same command goes on from there" in done.out
    stopped = [[event for event in events(folder, rank) if event["kind"] == "step"][-1]["step"] for rank in (0, 1)]
    assert stopped[0] == stopped[1]
    assert json.loads((folder / "report.json").read_text())["state"] == "stopped"

    # coremill stop.
    def ask(_launcher: int, _ranks: list[int]) -> None:
        asked = scene.coremill("stop", "war")
        assert asked.code == 0 and "was asked to stop" in asked.out

    done = interrupted(scene, folder, ask, after_steps=5)
    assert done.code == 75 and not done.left, str(done)
    assert f"continuing from step {stopped[0]}" in done.out
    assert not (folder / "stop-request.json").exists()
    assert "is not running" in scene.coremill("stop", "war").out

    # A rank is killed, and the newest checkpoint has rotted.
    done = interrupted(scene, folder, lambda _, ranks: os.kill(ranks[0], signal.SIGKILL), after_steps=12)
    assert done.code == 137 and not done.left, str(done)
    newest = max((folder / "checkpoints").glob("step-*"))
    with (newest / "rank-00001-of-00002.safetensors").open("r+b") as file:
        file.seek(-7, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-7, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    before = max((folder / "checkpoints").glob("step-*"), key=lambda path: (path != newest, path.name))

    steps = max(losses(folder)) + 5
    done = scene.run(in_folder("war", steps))
    assert done.code == 0 and not done.left, str(done)
    assert f"checkpoint {newest.name} passed over: rank-00001-of-00002.safetensors was altered" in done.out
    assert f"the run goes on after step {int(before.name.removeprefix('step-'))}" in done.out

    peace = scene.path("peace")
    assert scene.run(in_folder("peace", steps)).code == 0
    assert len(random_states(peace)) == 2  # each rank draws its own dropout
    assert losses(folder) == losses(peace)
    assert digest(folder) == digest(peace)
    report, undisturbed = (json.loads((each / "report.json").read_text()) for each in (folder, peace))
    assert report["state"] == "finished"
    assert (report["steps"], report["loss_last"]) == (steps, undisturbed["loss_last"])
    assert report["tokens"] == undisturbed["tokens"]
    assert (report["pauses"], undisturbed["pauses"]) == (3, 0) and undisturbed["pause_seconds"] == 0
    first, last = report["environment"]["started"], report["environment"]["last_word"]
    assert report["seconds"] + report["pause_seconds"] == pytest.approx(last - first) and report["pause_seconds"] > 0
    assert sum(event["kind"] == "start" for event in events(folder)) == 4

    # Finished: it goes on when asked for more, with what may change; what may not says the value it had.
    more = in_folder("peace", steps + 5)
    changed = in_folder("peace", steps + 5, "train.learning_rate=0.005", "evaluation.rows=7")
    refused = scene.run([*changed, "--set", "data.sequence_length=16"])
    assert refused.code == 78
    assert "where: data.sequence_length\n" in refused.err and "data.sequence_length was 32, is 16" in refused.err
    assert "--set data.sequence_length=32" in refused.err and "--fresh" in refused.err

    # Another number of ranks, the other engine.
    done = scene.run([*changed, "--nproc", "1", "--set", "parallel.engine=shard"])
    assert done.code == 0, str(done)
    assert f"continuing from step {steps}" in done.out
    assert (
        f"train.learning_rate: 0.01 -> 0.005, train.steps: {steps:,} -> {steps + 5:,}: the learning rate goes from 0.01"
        f" in step {steps:,} to 0.005 in step {steps + 1:,}"
    ) in done.out
    assert "evaluation.rows: 64 -> 7" in done.out and "parallel.engine: auto -> shard" in done.out
    rates = {event["step"]: event["learning_rate"] for event in events(peace) if event["kind"] == "step"}
    assert (rates[steps], rates[steps + 1]) == (0.01, 0.005)
    assert [event["tokens"] for event in events(peace) if event["kind"] == "evaluation"][-1] == 7 * 32
    assert f"run: 5 of {steps + 5:,} steps left, " in done.out
    plan, report = (json.loads((peace / name).read_text()) for name in ("plan.json", "report.json"))
    assert (plan["steps"], plan["steps_done"], report["steps_planned"]) == (steps + 5, steps, steps + 5)
    assert plan["hours"] == pytest.approx(report["plan"]["hours"] * 5 / (steps + 5))
    assert sorted(losses(peace)) == list(range(1, steps + 6))
    assert json.loads((peace / "report.json").read_text())["state"] == "finished"
    again = scene.run([*changed, "--set", "evaluation.rows=8"])
    assert again.code == 0 and "holds this run, finished" in again.out
    assert "that evaluation.rows, " in again.out and " changed has no effect without more train.steps" in again.out
    again = scene.run(more)
    assert again.code == 78 and "holds this run, finished" in again.err
    assert "train.learning_rate was 0.005, is 0.01; nothing is left to learn at that" in again.err
