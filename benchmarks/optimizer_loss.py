"""What moments in 8 bits do to the loss: `python -m benchmarks.optimizer_loss [--shape S] [--start trained]`.

The same training with every optimizer and seed, one run after the other; prints the loss on held-out text at the end,
and how far the optimizers are from each other beside how far seeds are. Contenders:

  adamw    the reference
  8bit     train.optimizer: adamw-8bit
  inside   the same with train.update: inside
  nearest  adamw-8bit whose bf16 weights are rounded to the nearest instead of by chance; the same as 8bit in fp32

`--start trained` first trains the shape once with adamw, and all go on from there with a small rate on rows in another
order: there most steps are smaller than half the last bit of a bf16 weight. `--at-once N` gives each run its share of
the cores and starts N of them side by side: of a small model that is much the sooner. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import coremill_run, peers, processes
from benchmarks.plan_cases import M7, M60, Shape

FOLDER = peers.ROOT / "runs" / "optimizer-loss"
M50 = Shape(hidden=512, intermediate=1408, layers=8, vocabulary=24576)
# Shape, tokens a step, peak rate from scratch; None: the model of the built-in example.
SHAPES: dict[str, tuple[Shape | None, int, float]] = {
    "example": (None, 1024, 5e-3),
    "7M": (M7, 2048, 2e-3),
    "50M": (M50, 8192, 1e-3),
    "60M": (M60, 8192, 1e-3),
}
RATE_FROM_TRAINED = 2e-5
CONTENDERS: dict[str, dict[str, str]] = {
    "adamw": {"optimizer": "adamw"},
    "8bit": {"optimizer": "adamw-8bit", "update": "after"},
    "inside": {"optimizer": "adamw-8bit", "update": "inside"},
    "nearest": {"optimizer": "adamw-8bit", "update": "after"},
}
# Python runs it at its start, where it lies on its path.
TO_THE_NEAREST = '''\
"""Weights of adamw-8bit are rounded to the nearest."""

import sys
from importlib.machinery import PathFinder

NAME = "coremill.engines.optimizers.adamw_8bit"


def to_the_nearest(values, moved, bits):
    values.copy_(moved[:, : values.shape[1]])


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != NAME:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            assert callable(module.write_rounded)
            module.write_rounded = to_the_nearest

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
'''


@dataclass(frozen=True, kw_only=True)
class Session:
    folder: Path
    shape: str
    steps: int
    tokens_per_step: int
    dtype: str
    timeout_seconds: float

    def run_file(self, out: Path, *, seed: int, way: dict[str, str], start: Path | None, export: bool) -> Path:
        shape, _, rate = SHAPES[self.shape]
        random = {"weights": "random", "config": shape.config()} if shape else "built-in"
        document: dict[str, Any] = {
            "model": str(start) if start else random,
            **({} if start else {"tokenizer": "built-in"}),
            "data": {"source": "built-in", "sequence_length": 256, "evaluation_fraction": 0.02},
            "train": {
                "steps": self.steps,
                "tokens_per_step": self.tokens_per_step,
                "learning_rate": RATE_FROM_TRAINED if start else rate,
                "warmup_share": 0.03,
                "weight_decay": 0.1,
                "adam_beta2": 0.95,
                "seed": seed,
                **way,
            },
            "parallel": {"dtype": self.dtype, "ranks_per_node": 1},
            "checkpoint": {"every": "never"},
            "run": {"folder": str(out), "export": export},
        }
        path = out.with_suffix(".yaml")
        path.write_text(json.dumps(document, indent=1) + "\n")
        return path

    def train(
        self,
        name: str,
        *,
        seed: int,
        way: dict[str, str],
        cpus: Sequence[int],
        start: Path | None = None,
        export: bool = False,
    ) -> tuple[float, Path]:
        """Its loss on held-out text at the end, and its folder."""
        out = self.folder / f"{name}-{seed}"
        run_file = self.run_file(out, seed=seed, way=way, start=start, export=export)
        environment = peers.environment(FOLDER)
        if name == "nearest":
            patch = self.folder / "to-the-nearest"
            patch.mkdir(exist_ok=True)
            (patch / "sitecustomize.py").write_text(TO_THE_NEAREST)
            environment["PYTHONPATH"] = f"{patch}:{environment['PYTHONPATH']}"
        finished = processes.run_tree(
            ["taskset", "-c", ",".join(map(str, cpus)), *coremill_run.train_command(run_file)],
            environment=environment,
            folder=peers.ROOT,
            log=out.with_suffix(".log"),
            timeout_seconds=self.timeout_seconds,
        )
        if finished.timed_out or finished.returncode != 0:
            raise SystemExit(f"{out.name} ended with {finished.returncode}; see {finished.log}")
        return float(coremill_run.read_report(out)["metrics"]["loss"]), out


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, peers.interrupt)
    folder = FOLDER / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    session = Session(
        folder=folder,
        shape=options.shape,
        steps=options.steps,
        tokens_per_step=options.tokens_per_step or SHAPES[options.shape][1],
        dtype=options.dtype,
        timeout_seconds=options.timeout,
    )
    cpus = sorted(os.sched_getaffinity(0))
    start = None
    if options.start == "trained":
        loss, out = session.train("start", seed=0, way={"optimizer": "adamw"}, cpus=cpus, export=True)
        start = out / "export"
        print(f"all start from {loss:.4f}", flush=True)
    share = len(cpus) // options.at_once
    free: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for number in range(options.at_once):
        free.put(cpus[number * share : (number + 1) * share])

    def train(name: str, seed: int) -> float:
        mine, began = free.get(), time.monotonic()
        try:
            loss, _ = session.train(name, seed=seed, way=CONTENDERS[name], cpus=mine, start=start)
        finally:
            free.put(mine)
        print(f"seed {seed}, {name}: {loss:.4f}, {time.monotonic() - began:.0f} s", flush=True)
        return loss

    seeds = range(1, options.seeds + 1)
    with ThreadPoolExecutor(options.at_once) as pool:
        started = {(name, seed): pool.submit(train, name, seed) for seed in seeds for name in options.only}
        losses = {name: [started[name, seed].result() for seed in seeds] for name in options.only}
    print("\n" + table(losses))
    if options.json:
        facts = {"shape": options.shape, "steps": options.steps, "start": options.start, "dtype": options.dtype}
        facts["tokens_per_step"] = session.tokens_per_step
        options.json.write_text(json.dumps({**facts, "losses": losses}, indent=1) + "\n")
    return 0


def table(losses: dict[str, list[float]]) -> str:
    """Differences are taken within a seed: the same rows in the same order."""
    reference = losses.get("adamw")
    lines = ["| | each seed | mean | between seeds | from adamw, each seed |", "|---|---|---:|---:|---|"]
    for name, found in losses.items():
        spread = f"{max(found) - min(found):.4f}" if len(found) > 1 else ""
        off = [] if reference is None or name == "adamw" else [a - b for a, b in zip(found, reference, strict=True)]
        lines.append(
            f"| {name} | {', '.join(f'{loss:.4f}' for loss in found)} | {statistics.mean(found):.4f} | {spread}"
            f" | {', '.join(f'{each:+.4f}' for each in off)} |"
        )
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="example")
    parser.add_argument("--start", choices=("scratch", "trained"), default="scratch")
    parser.add_argument("--steps", type=int, default=300, help="of every run (default 300)")
    parser.add_argument("--tokens-per-step", type=int, help="default: as the shape has them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side (default 1)")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--only", default="adamw,8bit,inside", help=f"which of {', '.join(CONTENDERS)}, with commas")
    parser.add_argument("--timeout", type=float, default=900, help="seconds one run may take (default 900)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    options = parser.parse_args(argv)
    options.only = options.only.split(",")
    if set(options.only) - set(CONTENDERS):
        parser.error(f"--only takes {', '.join(CONTENDERS)}")
    if not 1 <= options.at_once <= len(os.sched_getaffinity(0)):
        parser.error("--at-once takes 1 to as many as there are cores")
    return options


if __name__ == "__main__":
    sys.exit(main())
