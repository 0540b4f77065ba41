"""A large run killed and resumed: `python -m benchmarks.large_resume [--shape 3B]`.

Random weights in the shape of Llama-3.2-3B (or -1B), `adamw-8bit`, `update: inside`, layers recomputed; saved after
step 2, all processes killed once step 4 is told, started again by the same command. Prints losses and norms of steps 3
and 4 of both and ends with 1 where a bit of them differs. At 3B it wants 30 GB of memory and of disk, at 1B half of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import coremill_run, peers
from benchmarks.plan_cases import B1, B3, LEAN_INSIDE, M7, Shape

FOLDER = peers.ROOT / "runs" / "large-resume"
SHAPES: dict[str, Shape] = {"3B": B3, "1B": B1, "7M": M7}
SAVED, KILLED, LAST = 2, 4, 4
POLL_SECONDS = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, peers.interrupt)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    run_file, run = FOLDER / "run.yaml", FOLDER / "run"
    run_file.write_text(json.dumps(document(options, run), indent=1) + "\n")
    began = time.monotonic()
    killed = steps_until_killed(run_file, run, options.timeout)
    print(f"killed after {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    subprocess.run(
        coremill_run.train_command(run_file, [f"train.steps={LAST}"]),
        env=peers.environment(FOLDER),
        cwd=peers.ROOT,
        timeout=options.timeout,
        check=True,
    )
    print(f"resumed and ended after {time.monotonic() - began:.0f} s", flush=True)
    again = told(run)[len(killed) :]
    if [step["step"] for step in again] != list(range(SAVED + 1, LAST + 1)):
        raise SystemExit(f"it did not go on from step {SAVED}: {[step['step'] for step in again]}")
    same = True
    for before, after in zip(killed[SAVED:], again, strict=True):
        for key in ("loss", "gradient_norm"):
            print(f"step {before['step']} {key}: {before[key]!r}, resumed {after[key]!r}")
            same &= before[key] == after[key]
    print("same bits" if same else "DIFFERENT")
    if options.json:
        options.json.write_text(json.dumps({"killed": killed, "resumed": again, "same": same}, indent=1) + "\n")
    return 0 if same else 1


def document(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    return {
        "model": {"weights": "random", "config": SHAPES[options.shape].config()},
        "tokenizer": "built-in",
        "data": {"source": "built-in", "sequence_length": 512},
        "train": {
            "steps": LAST,
            "tokens_per_step": 512,
            "learning_rate": 1e-4,
            "schedule": "constant",
            "activation_checkpointing": True,
            **LEAN_INSIDE,
        },
        "parallel": {"ranks_per_node": 1},
        "checkpoint": {"every": f"{SAVED}steps", "keep": 1},
        "run": {"folder": str(run), "export": False},
    }


def steps_until_killed(run_file: Path, run: Path, timeout_seconds: float) -> list[dict[str, Any]]:
    """Start it with more steps than it will have, end everything at once, and tell the steps it had."""
    process = subprocess.Popen(
        coremill_run.train_command(run_file, [f"train.steps={100 * LAST}"]),
        env=peers.environment(FOLDER),
        cwd=peers.ROOT,
        start_new_session=True,
    )
    began = time.monotonic()
    try:
        while len(told(run)) < KILLED:
            if process.poll() is not None or time.monotonic() - began > timeout_seconds:
                raise SystemExit("the run ended before it was killed")
            time.sleep(POLL_SECONDS)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                each.kill()
        process.wait()
    return told(run)[:KILLED]


def told(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return coremill_run.read_steps(run)
    return []


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_resume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="3B", help="7M: to try the command")
    parser.add_argument("--timeout", type=float, default=900, help="seconds each half may take (default 900)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
