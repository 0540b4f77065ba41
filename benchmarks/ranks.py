"""How many ranks of a machine pay: `python -m benchmarks.ranks [--shape 60M] [--seconds N]`.

One model with random weights on this machine, at every number of ranks that the plan would look at, under both engines.
All runs start, then take turns of a few seconds (benchmarks/turns.py). Printed: tokens per second (of BERT-large:
questions) beside those planned, over one rank's; memory of all ranks together beside that planned; and what `auto`
takes, beside the best.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import coremill_run, peers, turns
from benchmarks.encoder_cases import EncoderCase
from benchmarks.plan_cases import B1, M10, M52, M60, M350, Case, Shape
from coremill.hardware.cores import rank_counts
from coremill.hardware.probe import probe_node
from coremill.hardware.process_memory import MAPPED_FILE_BYTES

FOLDER = peers.ROOT / "runs" / "ranks"
SHAPES: dict[str, Shape] = {"10M": M10, "50M": M52, "60M": M60, "350M": M350, "1.24B": B1}
ENCODERS = {"BERT-large": "bert-large", "BERT-mini": "mini"}  # the last is to try the command
TOKENS_PER_STEP = 4096
SAMPLES_PER_STEP = 16
ENGINES = ("replicate", "shard")


@dataclass
class Way:
    """A number of ranks under an engine, and its run."""

    name: str
    run: Path
    contender: turns.Contender
    rates: Sequence[float] = ()

    @property
    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads((self.run / "plan.json").read_text())
        return plan

    def memory_bytes(self) -> int:
        """Peaks of its ranks, added up; pages of libraries as plans count them."""
        return sum(max(map(_own_bytes, rank)) + MAPPED_FILE_BYTES for rank in self.contender.events())


def _own_bytes(event: dict[str, Any]) -> int:
    own: int = event.get("peak_rss_bytes", 0) - event.get("mapped_file_bytes", 0)
    return own if event.get("mapped_file_bytes") else 0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    out = FOLDER / f"{options.shape}-{time.strftime('%Y%m%d-%H%M%S')}"
    out.mkdir(parents=True)
    case = case_of(options)
    case.prepare()
    counts = [int(count) for count in options.ranks.split(",")] if options.ranks else rank_counts(probe_node())
    wanted = [
        (ranks, engine, policy)
        for ranks in counts
        for engine in (options.engines.split(",") if ranks > 1 else ("replicate",))
        for policy in options.wait_policies.split(",")
    ]
    ways: list[Way] = []
    signal.signal(signal.SIGTERM, peers.interrupt)
    try:
        for ranks, engine, policy in wanted:  # one at a time: on the same cores they would wait for each other
            ways.append(start(case, ranks, engine, policy, out))
        try:
            turns.take_turns([way.contender for way in ways], options.seconds, options.turn)
        except KeyboardInterrupt:
            print("interrupted: what was measured so far", flush=True)
        per_step = case.samples if isinstance(case, EncoderCase) else case.tokens_per_step
        for way in ways:
            way.rates = way.contender.tokens_per_second_by_turn(per_step)
        memory = {way.name: way.memory_bytes() for way in ways}
    finally:
        for way in ways:
            turns.end(way.contender, ask=False)  # what they would save nobody wants
    print(table(ways, memory, "samples" if isinstance(case, EncoderCase) else "tokens"))
    auto = planned_by_auto(case, out)
    best = max(ways, key=lambda way: statistics.fmean(way.rates or (0.0,)))
    print(f"\nauto: {auto['value']}, for {auto['reason']}; the best was {best.name}")
    if options.json:
        rows = {way.name: {"tokens_per_second": way.rates, "memory_bytes": memory[way.name]} for way in ways}
        options.json.write_text(json.dumps({"ways": rows, "auto": auto}, indent=1) + "\n")
    return 0


def case_of(options: argparse.Namespace) -> Case | EncoderCase:
    """What is trained, but for ranks and engine."""
    if options.shape in ENCODERS:
        return EncoderCase(name=options.shape, shape=ENCODERS[options.shape], samples=SAMPLES_PER_STEP)
    return Case(
        name=options.shape, shape=SHAPES[options.shape], sequence_length=512, tokens_per_step=options.tokens_per_step
    )


def start(case: Case | EncoderCase, ranks: int, engine: str, wait_policy: str, out: Path) -> Way:
    name = f"{ranks} x {engine}" if ranks > 1 else "1 rank"
    folder = out / f"{engine}-{ranks}-{wait_policy}"
    environment = ""
    if wait_policy != "default":
        name, environment = f"{name}, {wait_policy}", f"env OMP_WAIT_POLICY={shlex.quote(wait_policy)} "
    folder.mkdir()
    run_file = folder / "run.yaml"
    run_file.write_text(replace(case, ranks=ranks, engine=engine).run_file(folder / "run", turns.ENDLESS_STEPS))
    command = environment + shlex.join(coremill_run.train_command(run_file))
    program = f"exec {command} > {shlex.quote(str(folder / 'log.txt'))} 2>&1"
    return Way(name, folder / "run", turns.start(name, program, folder, ranks=ranks, cache=FOLDER))


def planned_by_auto(case: Case | EncoderCase, out: Path) -> dict[str, Any]:
    """`parallel.ranks_per_node: auto`, its value and its reason, for a run of many steps."""
    document = json.loads(case.run_file(out / "auto", turns.ENDLESS_STEPS))
    document["parallel"] = {}
    run_file = out / "auto.yaml"
    run_file.write_text(json.dumps(document))
    command = [sys.executable, "-m", "coremill", "plan", str(run_file), "--json"]
    said = subprocess.run(command, env=peers.environment(FOLDER), cwd=peers.ROOT, stdout=subprocess.PIPE, check=True)
    choice: dict[str, Any] = json.loads(said.stdout)["ranks_per_node"]
    return choice


def table(ways: Sequence[Way], memory: dict[str, int], unit: str) -> str:
    digits = 0 if unit == "tokens" else 2
    lines = [
        f"| | {unit}/s | planned | over {ways[0].name} | planned | memory of all | planned |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    alone = ways[0]
    for way in ways:
        rate, planned = statistics.fmean(way.rates or (0.0,)), way.plan[f"{unit}_per_second"]
        ranks = way.plan["ranks_per_node"]["value"]
        planned_memory = ranks * way.plan["memory_bytes_per_rank"]["total"]
        pairs = zip(way.rates, alone.rates, strict=False)
        beside = statistics.median([mine / other for mine, other in pairs] or [0.0])
        over = planned / alone.plan[f"{unit}_per_second"]
        lines.append(
            f"| {way.name} | {rate:.{digits}f} | {planned:.{digits}f} | {beside:.2f} | {over:.2f}"
            f" | {memory[way.name] / 1e9:.2f} GB | {planned_memory / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=(*SHAPES, *ENCODERS), default="60M")
    parser.add_argument("--ranks", default="", help="numbers of ranks, with commas (default: those the plan looks at)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of several ranks (default both)")
    parser.add_argument("--wait-policies", default="default", help="of OpenMP's threads: default,passive,active")
    parser.add_argument("--tokens-per-step", type=int, default=TOKENS_PER_STEP)
    parser.add_argument("--seconds", type=float, default=180, help="of turns, after all have started (default 180)")
    parser.add_argument("--turn", type=float, default=6.0, help="seconds of a turn (default 6)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
