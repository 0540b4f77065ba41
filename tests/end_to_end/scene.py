"""The command line as a user meets it: a folder with a tiny model, text and run file, and commands run in it.

Every command carries a marker in its environment, which whatever it starts inherits: `left_behind` looks for processes
that still have it. The cache holds rates made up once per session, so that no test measures the machine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coremill.child import wrapped
from coremill.hardware.calibrate import calibration_of
from coremill.hardware.calibrate_part import Part
from coremill.hardware.probe import probe_node

SOURCE = Path(__file__).resolve().parents[2] / "src"
MARKER = "COREMILL_TEST_MARKER"
# What a launcher further out, or the developer's shell, may have left: no test depends on it.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "PMI_", "PET_", "TORCHELASTIC_", "HF_", "OMP_")
DEADLINE_SECONDS = 240  # only a hang takes that long, even on a machine that others use

RUN_FILE = """\
model: model
data:
  source: text/*.jsonl
  sequence_length: 32
  evaluation_fraction: 0.1
train:
  steps: 8
  tokens_per_step: 256
  learning_rate: 1.0e-2
  warmup_steps: 2
parallel:
  dtype: fp32
  wire_dtype: fp32
  threads_per_rank: 1
run:
  folder: run
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    left: list[str]  # processes it left behind

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@dataclass(frozen=True)
class Running:
    """A command that has been started in a group of its own, as a terminal would."""

    process: subprocess.Popen[str]
    marker: str

    def end(self, timeout_seconds: float = DEADLINE_SECONDS) -> Ended:
        """Wait for it."""
        try:
            out, err = self.process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return Ended(self.process.returncode, out, err, left_behind(self.marker))

    def kill(self) -> None:
        """Whatever still runs of it."""
        self.process.kill()
        for line in left_behind(self.marker, patience_seconds=0):
            os.kill(int(line.split()[0]), 9)
        self.process.communicate()


@dataclass(frozen=True)
class Scene:
    """A folder to run commands in."""

    folder: Path
    cache: Path

    def environ(self, marker: str, changes: Mapping[str, str]) -> dict[str, str]:
        """What a command finds around it."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return {
            **clean,
            MARKER: marker,
            "COREMILL_CACHE": str(self.cache),
            "HF_HOME": str(self.cache / "hub"),
            "PYTHONPATH": str(SOURCE),
            **changes,
        }

    def start(self, command: Sequence[str | Path], environ: Mapping[str, str] | None = None, **options: Any) -> Running:
        """Start any command here."""
        marker = uuid.uuid4().hex
        # It dies with pytest, also where that is killed in the middle of a test.
        process = subprocess.Popen(
            wrapped([str(word) for word in command], launcher_pid=os.getpid(), cpus=None),
            cwd=self.folder,
            env=self.environ(marker, environ or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        return Running(process, marker)

    def coremill(self, *words: str | Path, environ: Mapping[str, str] | None = None) -> Ended:
        """`python -m coremill WORDS`, to its end."""
        return self.start([sys.executable, "-m", "coremill", *words], environ).end()

    def run(self, command: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> Ended:
        """Any command, to its end."""
        return self.start(command, environ).end()

    def path(self, name: str) -> Path:
        """A file or folder here."""
        return self.folder / name


def left_behind(marker: str, patience_seconds: float = 60.0) -> list[str]:
    """Processes that carry the marker, given time, where the machine is busy, for those that are just ending."""
    deadline = time.monotonic() + patience_seconds
    while True:
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    if f"{MARKER}={marker}".encode() in (process / "environ").read_bytes():
                        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        found.append(f"{process.name} {words}")
                except OSError:  # gone meanwhile
                    continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def make_cache(folder: Path) -> Path:
    """A cache with rates for this machine, none of them measured."""

    def rates(part: Part) -> dict[str, Any]:
        return {
            "fp32_matmul_flops_per_second": 40e9,
            "bf16_matmul_flops_per_second": 20e9,
            "bf16_emulated_flops_per_second": 1e8,
            "copy_bytes_per_second": 10e9,
            "base_rss_bytes": 400e6,
            "busy_fraction": 0.0,
            "splits": [],
        }

    calibration_of(replace(probe_node(), busy_fraction=0.0), folder, runner=rates)
    return folder


def write_text(folder: Path, *, documents: int = 60, seed: int = 1) -> Path:
    """Made-up words, so that there is something to learn; one JSON object a line."""
    words = ["mill", "core", "rank", "shard", "token", "loss", "step", "wheel"]
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["_".join(generator.choices(words, k=generator.randint(10, 40))) for _ in range(documents)]
    (folder / "part.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder
