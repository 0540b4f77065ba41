"""How long an update takes: `python -m benchmarks.optimizer_update [--threads N ...] [--rows N] [--json FILE]`.

One matrix of the width of Llama-3-8B, moved again and again: nanoseconds for each parameter, the quickest and the
median of all goes, of torch's fused AdamW in fp32 and of adamw-8bit over fp32 and bf16 weights; and bytes that each
holds beside the weight. For a machine that has nothing else to do. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from coremill.config.schema import TrainSection
from coremill.engines.optimizers import optimizer_of
from coremill.model.slices import RowSlice

COLUMNS = 4096
WAYS = (("adamw", torch.float32), ("adamw-8bit", torch.float32), ("adamw-8bit", torch.bfloat16))


@dataclass(frozen=True, kw_only=True)
class Measured:
    optimizer: str
    weights: str
    threads: int
    quickest_ns: float  # of a parameter
    median_ns: float
    state_bytes: float  # of a parameter


def measure(name: str, dtype: torch.dtype, *, threads: int, rows: int, goes: int) -> Measured:
    torch.set_num_threads(threads)
    module = nn.Linear(COLUMNS, rows, bias=False, dtype=dtype)
    weight = module.weight
    settings = optimizer_of(TrainSection(steps=1, optimizer="adamw-8bit" if name == "adamw-8bit" else "adamw"))
    optimizer = settings.make(module, [("weight", weight)], [RowSlice("weight", (rows, COLUMNS), 0, rows, weight)])
    gradient = torch.randn(rows, COLUMNS).mul_(1e-3).to(dtype)
    seconds = []
    for _ in range(goes + 1):
        began = time.perf_counter()
        optimizer.move(weight, gradient, 1e-5)
        seconds.append(time.perf_counter() - began)
    held = sum(tensor.nbytes for tensor in optimizer.state_of(weight)[0].values())
    nanoseconds = [1e9 * each / weight.numel() for each in seconds[1:]]  # the first makes the moments
    return Measured(
        optimizer=name,
        weights=str(dtype).removeprefix("torch."),
        threads=threads,
        quickest_ns=min(nanoseconds),
        median_ns=statistics.median(nanoseconds),
        state_bytes=held / weight.numel(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--rows", type=int, default=14336, help="of the matrix; 14336: a layer's largest")
    parser.add_argument("--goes", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for threads in options.threads:
        for name, dtype in WAYS:
            one = measure(name, dtype, threads=threads, rows=options.rows, goes=options.goes)
            found.append(one)
            print(
                f"{one.optimizer:11} {one.weights:9} {one.threads:2} threads: {one.quickest_ns:6.2f} ns a parameter"
                f" (median {one.median_ns:.2f}), {8.03 * one.quickest_ns:.1f} s for 8.03 B;"
                f" {one.state_bytes:.2f} bytes beside it"
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
