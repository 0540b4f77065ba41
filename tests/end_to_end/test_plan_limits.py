"""The plan against a real memory cgroup: what would exceed the limit starts no rank, what just fits is not killed.

Needs root and a memory controller that lets a group be made under the one this process is in (version 1 or 2).
"""

from __future__ import annotations

import json
import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coremill.hardware.calibrate import calibration_of
from coremill.hardware.calibrate_part import Part, run_part
from coremill.hardware.probe import probe_node
from coremill.plan.planner import LAUNCHER_BYTES
from end_to_end.scene import DEADLINE_SECONDS, Ended, Scene
from tiers import long_test

# 38 M parameters: state is twice the interpreter and its libraries, yet a step takes a second.
MODEL = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "vocab_size": 32000,
    "max_position_embeddings": 256,
}
RANKS = 2
RUN: dict[str, Any] = {
    "model": {"weights": "random", "config": MODEL},
    "tokenizer": "model",
    "data": {"source": "text/*.jsonl", "sequence_length": 64},
    "train": {
        "steps": 3,
        "tokens_per_step": 512,
        "micro_batch_rows": 4,
        "activation_checkpointing": False,
        "learning_rate": 1.0e-4,
    },
    "parallel": {"engine": "replicate", "ranks_per_node": RANKS, "threads_per_rank": 1, "dtype": "fp32"},
    # A copy of the state for the last checkpoint is taken only where it fits: it must not be what decides.
    "checkpoint": {"every": "never"},
    "run": {"folder": "run", "export": False},
}
MARGIN_BYTES = 16 * 2**20  # limits are cut to pages, and no plan means a byte


class MemoryGroup:
    """A cgroup with a memory limit, of either version."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version

    def limit(self, limit_bytes: int) -> None:
        """At most so much for all processes in it."""
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        (self.folder / name).write_text(str(limit_bytes))

    def enter(self) -> None:
        """Move this process; called in the child between fork and exec."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def kills(self) -> int:
        """Processes the kernel has killed for the limit."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        words = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(words.get("oom_kill", 0))


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """A group of its own below ours; skips where the kernel does not let us."""
    parent, version = _own_group()
    folder = parent / f"coremill-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {parent}: {error.strerror}")
    made = MemoryGroup(folder, version)
    try:
        try:
            made.limit(2**33)
        except OSError as error:
            pytest.skip(f"no memory limit can be set in {folder}: {error.strerror or 'no memory controller there'}")
        yield made
    finally:
        folder.rmdir()


def _own_group() -> tuple[Path, int]:
    """The folder of this process's group in the hierarchy that counts memory."""
    base = Path("/sys/fs/cgroup")
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    if "memory" in paths and (base / "memory").is_dir():
        return base / "memory" / paths["memory"].lstrip("/"), 1
    if (base / "cgroup.controllers").is_file() and "" in paths:
        return base / paths[""].lstrip("/"), 2
    pytest.skip("no memory cgroup is mounted under /sys/fs/cgroup")


@pytest.fixture(scope="module")
def measured_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rates made up, but the memory of a bare rank as it is."""
    folder = tmp_path_factory.mktemp("measured-cache")

    def runner(part: Part) -> Any:
        if part.name == "base-memory":
            return run_part(part)
        return {
            "fp32_matmul_flops_per_second": 40e9,
            "bf16_matmul_flops_per_second": 20e9,
            "bf16_emulated_flops_per_second": 1e8,
            "copy_bytes_per_second": 10e9,
            "busy_fraction": 0.0,
            "splits": [],
        }

    calibration_of(probe_node(busy_seconds=0), folder, runner=runner)
    return folder


@pytest.fixture
def place(scene: Scene, measured_cache: Path) -> Scene:
    """The scene with a run that has no choice left open."""
    (scene.folder / "limits.yaml").write_text(json.dumps(RUN))
    return Scene(scene.folder, measured_cache)


def _needed_bytes(place: Scene) -> int:
    """Of all ranks and the launcher, by the plan."""
    planned = place.coremill("plan", "limits.yaml", "--json")
    assert planned.code == 0, str(planned)
    return RANKS * int(json.loads(planned.out)["memory_bytes_per_rank"]["total"]) + LAUNCHER_BYTES


def _train(place: Scene, group: MemoryGroup, limit_bytes: int) -> Ended:
    group.limit(limit_bytes)
    command = [sys.executable, "-m", "coremill", "train", "limits.yaml", "--fresh"]
    return place.start(command, preexec_fn=group.enter).end()


@long_test("a rank is killed for memory below, test_bad_input.py refuses what does not fit")
def test_the_limit_decides(place: Scene, group: MemoryGroup) -> None:
    """One run, two limits: a little less than it needs, and a little more."""
    needed = _needed_bytes(place)

    refused = _train(place, group, needed - MARGIN_BYTES)
    assert refused.code == 78, str(refused)
    assert "does not fit" in refused.err
    assert not place.path("run/events").exists(), "a rank was started"

    done = _train(place, group, needed + MARGIN_BYTES)
    assert done.code == 0, str(done)
    assert group.kills == 0
    report = json.loads(place.path("run/report.json").read_text())
    assert report["steps"] == 3 and report["plan"]["memory_limit_bytes_per_rank"] * RANKS <= needed + MARGIN_BYTES


@pytest.mark.timeout(600)
def test_a_rank_killed_for_memory_is_told_with_limit_peak_and_plan(place: Scene, group: MemoryGroup) -> None:
    group.limit(700 * 10**6)  # launcher, fork server and bare ranks, not their training
    settings = ("run.folder=killed", "supervise.restarts_without_progress=1", "train.steps=100000")
    words = [sys.executable, "-m", "coremill", "train", "limits.yaml", "--force"]
    words += [word for setting in settings for word in ("--set", setting)]
    done = place.start(words, preexec_fn=group.enter).end(2 * DEADLINE_SECONDS)
    assert done.code == 137 and not done.left, str(done)
    assert group.kills >= 2  # the other rank may follow before it is ended
    assert done.out.count("was ended by SIGKILL: out of memory") == 2 and "fork server" not in done.out, str(done)
    assert "the limit here is 0.70 GB" in done.err and "all processes under it together reached 0.70 GB" in done.err
    assert re.search(r"the plan was [01]\.\d\d GB per rank", done.err), str(done)
