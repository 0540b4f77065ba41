"""What a peer's rank writes down: seconds, loss and real tokens of each optimizer step, and its own peak memory.

Peers record themselves from inside, by one clock rule: a step lasts from the end of the one before to its own end.
Times of day are kept too: who watches from outside (the bytes on a link) can then tell loading and steps apart.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path


def peak_rss_bytes() -> int:
    """VmHWM of this process. Not ru_maxrss: that one keeps the size of the process this one was forked from."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


@dataclass
class StepRecorder:
    """Collects the steps of one rank; `write` leaves them as JSON for the driver."""

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    real_tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # real tokens and padding
    step_ends: list[float] = field(default_factory=list)  # time of day
    load_began: float = 0.0  # time of day: ranks have met, the model is not yet read
    first_step_began: float = 0.0  # time of day
    _last: float = 0.0
    _real: int = 0
    _positions: int = 0

    def loading(self) -> None:
        """Call right before the model is read."""
        self.load_began = time.time()

    def begin(self) -> None:
        """Call right before the first step."""
        self.first_step_began = time.time()
        self._last = time.perf_counter()

    def count(self, real_tokens: int, positions: int) -> None:
        """Call once per micro-batch."""
        self._real += real_tokens
        self._positions += positions

    def end_step(self) -> None:
        """Call right after the optimizer's step."""
        now = time.perf_counter()
        self.step_seconds.append(now - self._last)
        self.real_tokens.append(self._real)
        self.positions.append(self._positions)
        self.step_ends.append(time.time())
        self._last, self._real, self._positions = now, 0, 0

    def write(self, folder: Path) -> None:
        """Leave `rank-N.json` in the folder the driver named."""
        import torch

        rank = int(os.environ["RANK"])
        record = {
            "rank": rank,
            "pid": os.getpid(),
            "world_size": int(os.environ["WORLD_SIZE"]),
            "threads": torch.get_num_threads(),
            "step_seconds": self.step_seconds,
            "losses": self.losses,
            "real_tokens": self.real_tokens,
            "positions": self.positions,
            "step_ends": self.step_ends,
            "load_began": self.load_began,
            "first_step_began": self.first_step_began,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        unfinished = folder / f"rank-{rank}.json.partial"
        unfinished.write_text(json.dumps(record))
        unfinished.rename(folder / f"rank-{rank}.json")


@dataclass(frozen=True)
class ContenderArguments:
    """The command line every contender script takes."""

    workload: Path
    out: Path
    steps: int
    dtype: str
    rows_per_rank: int
    seed: int
    learning_rate: float
    ordered_rows: Path | None  # packed rows to take as they lie; None: the workload's, shuffled by the seed
    random_weights: Path | None  # config.json of a model to make; None: the workload's


def parse_arguments(description: str) -> ContenderArguments:
    """Read the common command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", type=Path, required=True, help="folder made by benchmarks.workload")
    parser.add_argument("--out", type=Path, required=True, help="folder for rank-N.json")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps, the untimed first one included")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--rows-per-rank", type=int, default=1, help="packed rows per optimizer step on each rank")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--ordered-rows", type=Path, help="packed rows to take in the order in which they lie")
    parser.add_argument("--random-weights", type=Path, help="config.json of a model to train instead (zero3_packed)")
    return ContenderArguments(**vars(parser.parse_args()))
