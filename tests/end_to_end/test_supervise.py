"""Ranks that die or hang while nobody looks: the run goes on by itself, with the numbers it would have had."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from end_to_end.scene import DEADLINE_SECONDS, Running, Scene, left_behind
from end_to_end.test_stop import FAULT

TRAIN = [sys.executable, "-m", "coremill", "train", "run.yaml", "--nproc", "2"]
WITHOUT_END = 1_000_000


def command(folder: str, steps: int, *settings: str) -> list[str]:
    """With a constant learning rate, so that a step is the same wherever the end is."""
    words = [f"run.folder={folder}", f"train.steps={steps}", "train.schedule=constant", *settings]
    return [*TRAIN, *(word for setting in words for word in ("--set", setting))]


def events(folder: Path, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
    """Of all ranks, or of one."""
    files = sorted((folder / "events").glob("rank-*.jsonl" if rank is None else f"rank-{rank:05d}.jsonl"))
    lines = [line for file in files for line in file.read_bytes().splitlines() if line.endswith(b"}")]
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def losses(folder: Path) -> dict[int, float]:
    """By step; of a step that was done twice, both agree."""
    found: dict[int, float] = {}
    for event in events(folder, "step"):
        assert found.setdefault(event["step"], event["loss"]) == event["loss"]
    return found


def weights(folder: Path, step: int) -> list[str]:
    """What is saved of a step, both ranks."""
    files = sorted((folder / "checkpoints" / f"step-{step:08d}").glob("rank-*.safetensors"))
    assert len(files) == 2
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@contextmanager
def going(scene: Scene, words: list[str]) -> Iterator[tuple[Running, Callable[[Callable[[], bool]], None]]]:
    """The command, and a way to wait for something while it runs."""
    running = scene.start(words)

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            if running.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(str(running.end(1.0)))
            time.sleep(0.2)

    try:
        yield running, wait_for
    finally:
        if running.process.poll() is None:
            running.kill()


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="a minute, and test_chaos.py does the same faults: COREMILL_LONG_TESTS=1 runs it",
)
@pytest.mark.timeout(900)  # three starts, of which each takes half a minute on a machine that others use
def test_killed_paused_and_stopped_ranks_cost_nothing_but_time(scene: Scene) -> None:
    folder = scene.path("war")

    def pid_of(rank: int) -> int:
        return int(events(folder, "start", rank)[-1]["pid"])

    def steps_since(moment: float) -> int:
        return sum(event["time"] > moment for event in events(folder, "step", 0))

    with going(scene, command("war", WITHOUT_END, "checkpoint.every=10steps")) as (running, wait_for):
        wait_for(lambda: steps_since(0.0) >= 12)
        os.kill(pid_of(1), signal.SIGKILL)
        wait_for(lambda: len(events(folder, "restart")) == 1)

        # Stopped, but not for long: nobody minds.
        again = time.time()
        wait_for(lambda: steps_since(again) >= 5)
        os.kill(pid_of(1), signal.SIGSTOP)
        time.sleep(5)
        os.kill(pid_of(1), signal.SIGCONT)
        healed = time.time()
        wait_for(lambda: steps_since(healed) >= 12)
        assert len(events(folder, "fault")) == 1

        os.kill(pid_of(0), signal.SIGSTOP)
        wait_for(lambda: len(events(folder, "restart")) == 2)
        before = events(folder, "fault", 0)[0]["step"]
        wait_for(lambda: events(folder, "step", 0)[-1]["step"] > before)
        running.process.terminate()
        done = running.end()
    assert done.code == 75 and not done.left, str(done)

    killed, stopped = sorted(events(folder, "fault"), key=lambda event: event["time"])
    assert (killed["rank"], killed["cause"], killed["action"]) == (1, "killed", "restart")
    assert (stopped["rank"], stopped["cause"], stopped["action"]) == (0, "stuck", "restart")
    assert stopped["detected_seconds"] >= 10
    for fault, restart in zip(
        (killed, stopped), sorted(events(folder, "restart"), key=lambda e: e["time"]), strict=True
    ):
        assert restart["from_step"] == fault["committed_step"] > 0
        assert restart["steps_lost"] == fault["step"] - fault["committed_step"]
    assert re.search(r"rank 1 was ended by SIGKILL: all ranks start again from step \d+ \(restart 1\)", done.out)
    assert re.search(r"rank 0 is stopped \(no sign of life for \d+ s in step \d+\): all ranks start again", done.out)
    assert re.search(r"training again after [\d.]+ s from step \d+: \d+ steps? repeated", done.out)
    report = json.loads((folder / "report.json").read_text())
    assert [fault["rank"] for fault in report["faults"]] == [1, 0]
    assert all(fault["resumed_seconds"] > 0 for fault in report["faults"])

    last = max(losses(folder))
    peace = scene.path("peace")
    done = scene.run(command("peace", last, "checkpoint.every=1000steps", "run.export=false"))
    assert done.code == 0, str(done)
    assert losses(folder) == losses(peace)
    assert weights(folder, last) == weights(peace, last)


@pytest.mark.timeout(600)
def test_a_crash_loop_ends_with_its_cause(scene: Scene) -> None:
    (scene.path("fault")).mkdir()
    (scene.path("fault") / "sitecustomize.py").write_text(FAULT)
    paths = f"{scene.path('fault')}{os.pathsep}{scene.environ('', {})['PYTHONPATH']}"
    words = command("loop", WITHOUT_END, "checkpoint.every=never", "supervise.restarts_without_progress=1")
    done = scene.start(words, {"PYTHONPATH": paths}).end(2 * DEADLINE_SECONDS)
    assert done.code == 1 and not done.left, str(done)
    said = "rank 1: ArithmeticError: a fault of rank 1: "
    assert f"{said}all ranks start again from the start (restart 1)" in done.out
    assert f"{said}the run ends, restarted once without a new committed step" in done.out
    assert done.err.splitlines()[0] == "error on rank 1: ArithmeticError: a fault of rank 1"
    assert [fault["action"] for fault in events(scene.path("loop"), "fault")] == ["restart", "end"]
    report = json.loads((scene.path("loop") / "report.json").read_text())
    assert (report["state"], report["error"]["rank"], report["error"]["exit_code"]) == ("failed", 1, 1)


def test_a_killed_launcher_leaves_nothing_after_a_restart_either(scene: Scene) -> None:
    folder = scene.path("orphans")
    with going(scene, command("orphans", WITHOUT_END)) as (running, wait_for):
        wait_for(lambda: len(events(folder, "step", 1)) >= 2)
        os.kill(int(events(folder, "start", 1)[0]["pid"]), signal.SIGKILL)
        wait_for(lambda: len(events(folder, "start", 1)) == 2)
        running.process.kill()
        running.process.communicate()
        assert left_behind(running.marker) == []
