"""What a peer's rank writes down: seconds, loss and real tokens of each optimizer step, and its own peak memory.

Peers record themselves from inside, by one clock rule: a step lasts from the end of the one before to its own end.
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
    _last: float = 0.0
    _real: int = 0
    _positions: int = 0

    def begin(self) -> None:
        """Call right before the first step."""
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
        self._last, self._real, self._positions = now, 0, 0

    def write(self, folder: Path) -> None:
        """Leave `rank-N.json` in the folder the driver named."""
        import torch

        rank = int(os.environ["RANK"])
        record = {
            "rank": rank,
            "world_size": int(os.environ["WORLD_SIZE"]),
            "threads": torch.get_num_threads(),
            "step_seconds": self.step_seconds,
            "losses": self.losses,
            "real_tokens": self.real_tokens,
            "positions": self.positions,
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


def parse_arguments(description: str) -> ContenderArguments:
    """Read the common command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", type=Path, required=True, help="folder made by benchmarks.workload")
    parser.add_argument("--out", type=Path, required=True, help="folder for rank-N.json")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps, the untimed first one included")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--rows-per-rank", type=int, default=1, help="packed rows per optimizer step on each rank")
    parser.add_argument("--seed", type=int, default=7)
    return ContenderArguments(**vars(parser.parse_args()))
