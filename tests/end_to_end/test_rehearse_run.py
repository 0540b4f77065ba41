"""A real run, rehearsed: pods of the rendered job train, one is taken back, and the loss is that of one process.

The long form takes four pods, many reclaims and kills, every kind of job and Trainer release.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from end_to_end.scene import RUN_FILE, Scene, make_cache
from k8s.rehearsing import why_not
from tiers import long_test

_reason = why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=f"no pods here: {_reason}"),
    pytest.mark.timeout(900),  # pods start twice, each imports torch
]
pods_train = long_test("tests/k8s/test_rehearse.py reclaims and kills pods of a small program")
DEADLINE_SECONDS = 850
STEPS, EVERY = 12, 4
TOKEN = "hf_" + "RehearsedFakeToken" * 2
RUN = RUN_FILE.replace("steps: 8", f"steps: {STEPS}") + f"checkpoint: {{every: {EVERY}steps}}\n"
SECTION = """
fleet: {nodes: NODES, instance: c7i.8xlarge}
kubernetes: {image: "example.com/coremill:0.1.0", karpenter: none, kind: KIND, cpus: 4, memory_gib: 4}
"""


@pytest.fixture(scope="module")
def place(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """The scene with rates for as many processors as a pod of two or four is given."""
    cache, before = tmp_path_factory.mktemp("rates"), os.sched_getaffinity(0)
    cpus = sorted(before)
    try:
        for pods in (1, 2, 4):
            os.sched_setaffinity(0, cpus[: max(1, len(cpus) // pods)])
            make_cache(cache)
    finally:
        os.sched_setaffinity(0, before)
    return Scene(scene.folder, cache)


@pytest.fixture(scope="module")
def loss_alone(place: Scene) -> float:
    """The last loss of the same run by one process."""
    place.path("alone.yaml").write_text(RUN.replace("folder: run", "folder: alone"))
    done = place.coremill("train", "alone.yaml", "--nproc", "1")
    assert done.code == 0, done
    return float(json.loads(place.path("alone/report.json").read_text())["loss_last"])


@dataclass(frozen=True)
class Rehearsed:
    """A rehearsal that has ended."""

    code: int
    screen: str
    summary: dict[str, Any]


def rehearse(place: Scene, name: str, *words: str, nodes: int = 2, kind: str = "job", change: str = "") -> Rehearsed:
    section = SECTION.replace("NODES", str(nodes)).replace("KIND", kind)
    place.path(f"{name}.yaml").write_text(RUN + change + section)
    command = ["-m", "coremill", "k8s", "rehearse", f"{name}.yaml", "--json", "-o", f"out-{name}", *words]
    ended = place.start([sys.executable, *command], {"HF_TOKEN": TOKEN}).end(DEADLINE_SECONDS)
    assert ended.left == [], ended
    assert TOKEN not in ended.out + ended.err
    for path in place.path(f"out-{name}").rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    return Rehearsed(ended.code, str(ended), json.loads(ended.out) if ended.out else {})


@pods_train
def test_pod_zero_is_taken_back_and_the_loss_is_that_of_one_process(place: Scene, loss_alone: float) -> None:
    done = rehearse(place, "short", "--reclaim", "0@5steps")
    assert done.code == 0, done.screen
    summary = done.summary
    assert (summary["passed"], summary["state"], summary["steps"], summary["steps_lost"]) == (
        True,
        "complete",
        STEPS,
        0,
    )
    assert summary["loss_last"] == pytest.approx(loss_alone, abs=1e-5)
    lives = [one for one in summary["pods"] if one["pod"] == 0]
    assert [one["exit_code"] for one in lives] == [75, 0] and lives[0]["address"] != lives[1]["address"]
    assert summary["restarts_counted"] == 0 and summary["times"]["longest_save_seconds"] > 0
    assert "is a path of this machine: mounted read-only for the rehearsal" in done.screen
    assert str(place.folder) not in Path("/proc/self/mountinfo").read_text()


@pods_train
@pytest.mark.parametrize("number", range(20))
def test_a_reclaim_at_any_time_loses_nothing(place: Scene, loss_alone: float, number: int) -> None:
    drawn = random.Random(number)
    pod, step = number % 4 if number < 8 else drawn.randrange(4), drawn.randint(1, STEPS - 2)
    done = rehearse(place, f"reclaim{number}", "--reclaim", f"{pod}@{step}steps", nodes=4)
    assert done.code == 0 and done.summary["steps_lost"] == 0, done.screen
    assert done.summary["loss_last"] == pytest.approx(loss_alone, abs=1e-5)


@pods_train
@pytest.mark.parametrize("number", range(20))
def test_a_kill_at_any_time_loses_one_interval_at_most(place: Scene, loss_alone: float, number: int) -> None:
    drawn = random.Random(100 + number)
    pod, step = number % 4 if number < 8 else drawn.randrange(4), drawn.randint(1, STEPS - 2)
    done = rehearse(place, f"kill{number}", "--kill", f"{pod}@{step}steps", nodes=4)
    assert done.code == 0 and done.summary["steps_lost"] <= EVERY, done.screen
    assert done.summary["loss_last"] == pytest.approx(loss_alone, abs=1e-5)


@pods_train
@pytest.mark.parametrize(
    "kind", ["jobset", "trainjob, trainer: '2.1'", "trainjob, trainer: '2.2'", "trainjob, trainer: '2.3'"]
)
def test_each_kind_of_job(place: Scene, loss_alone: float, kind: str) -> None:
    name = "".join(letter for letter in kind if letter.isalnum())
    done = rehearse(place, name, kind=kind)
    assert done.code == 0 and done.summary["restarts"] == 0, done.screen
    assert done.summary["loss_last"] == pytest.approx(loss_alone, abs=1e-5)


@pods_train
def test_bad_input_and_numbers_that_are_not_finite_end_the_job(place: Scene) -> None:
    done = rehearse(place, "missing", "--set", "data.column=nowhere")
    assert (done.code, done.summary["reason"], done.summary["restarts"]) == (1, "PodFailurePolicy", 0), done.screen
    assert 78 in [one["exit_code"] for one in done.summary["pods"]] and "nowhere" in done.screen
    settings = ["train.learning_rate=1e30", "train.warmup_steps=0", "train.clip_norm=1e30"]
    done = rehearse(place, "wild", *(word for one in settings for word in ("--set", one)))
    assert (done.code, done.summary["reason"], done.summary["restarts"]) == (1, "PodFailurePolicy", 0), done.screen
    assert 70 in [one["exit_code"] for one in done.summary["pods"]]
