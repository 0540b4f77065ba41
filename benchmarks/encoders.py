"""Question answering beside HF Trainer: `python -m benchmarks.encoders [--shape bert-base] [--dtype fp32]`.

The same BERT (random weights, made once), the same made-up questions of SQuAD's lengths, the same samples a step:

  coremill  `coremill train`, task question-answering: batches of like lengths, padded to their own longest
  pad       HF Trainer in the manner of run_qa: every row padded to 384
  group     HF Trainer that groups by length itself (`train_sampling_strategy: group_by_length`)
  no-attention-dropout   coremill with `model.attention_dropout: 0` (with `--only`)

All run at once and take turns of a few seconds (benchmarks/turns.py), so that a slow minute of the machine is
everybody's. Prints samples a second, padding and ratios; `--metric` instead trains each to the end over three seeds and
prints exact match and F1 after equal steps. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks import encoder_work, peers, processes, results, turns

FOLDER = peers.ROOT / "runs" / "encoders"
CONTENDERS = {
    "coremill": "coremill",
    "pad": "HF Trainer, padded to 384",
    "group": "HF Trainer, grouped by length",
    "no-attention-dropout": "coremill, attention_dropout 0",
}
USUAL = ("coremill", "pad", "group")
TARGETS = {"pad": ">= 1.8", "group": ">= 1.0"}
STRIDE = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Do what was asked for; 1 where a contender failed, else 0, whatever the figures are."""
    options = _parse(argv)
    signal.signal(signal.SIGTERM, peers.interrupt)
    options.folder = options.folder.resolve()
    folder = options.folder / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    work = make_work(options)
    print(f"{options.shape}, {options.dtype}, {options.samples} samples a step; logs in {folder}", flush=True)
    return (compare_metrics if options.metric else compare_rates)(options, work, folder)


def make_work(options: argparse.Namespace) -> encoder_work.Work:
    """Once for each shape, in a process of its own: the driver stays small, without torch."""
    folder = options.folder / f"work-{options.shape}-{options.questions}-{options.dropout:g}"
    if not (folder / "done").exists():
        print(f"making model and questions in {folder}", flush=True)
        command = [sys.executable, "-m", "benchmarks.encoder_work", str(folder), "--shape", options.shape]
        command += ["--questions", str(options.questions), "--dropout", str(options.dropout)]
        subprocess.run(command, check=True, cwd=peers.ROOT, env=peers.environment(options.folder))
        (folder / "done").touch()
    return encoder_work.Work(folder)


# -- contenders


def command_of(
    key: str,
    options: argparse.Namespace,
    work: encoder_work.Work,
    out: Path,
    *,
    steps: int,
    seed: int,
    evaluates: bool = False,
) -> list[str]:
    """What a user would type."""
    if key in ("pad", "group"):
        command = [sys.executable, "-m", "benchmarks.contenders.qa_trainer", key, "--model", str(work.model)]
        command += ["--data", str(work.train), "--out", str(out), "--samples", str(options.samples)]
        command += ["--steps", str(steps), "--length", str(encoder_work.LONGEST), "--stride", str(STRIDE)]
        command += ["--seed", str(seed), "--dtype", options.dtype, "--learning-rate", str(options.learning_rate)]
        return command + (["--evaluate", str(work.evaluation)] if evaluates else [])
    document: dict[str, Any] = {
        "task": "question-answering",
        "model": {"name": str(work.model)},
        "data": {"source": str(work.train), "sequence_length": encoder_work.LONGEST, "doc_stride": STRIDE},
        "train": {
            "steps": steps,
            "samples_per_step": options.samples,
            "learning_rate": options.learning_rate,
            "seed": seed,
            **({} if options.rows is None else {"micro_batch_rows": options.rows}),
        },
        "parallel": {
            "dtype": options.dtype,
            "ranks_per_node": options.ranks,
            "engine": options.engine,
            "threads_per_rank": options.threads or "auto",
        },
        "checkpoint": {"every": "never"},
        "run": {"folder": str(out / "run"), "export": False},
    }
    if key == "no-attention-dropout":
        document["model"]["attention_dropout"] = 0
    if evaluates:
        document["data"]["evaluation_source"] = str(work.evaluation)
    run_file = out / "run.yaml"
    run_file.write_text(json.dumps(document, indent=1))  # JSON is YAML
    return [sys.executable, "-m", "coremill", "train", str(run_file), "--fresh"]


# -- rates


def compare_rates(options: argparse.Namespace, work: encoder_work.Work, folder: Path) -> int:
    """All at once, in turns."""
    contenders: dict[str, turns.Contender] = {}
    try:
        for key in options.only:
            out = folder / key
            out.mkdir()
            command = command_of(key, options, work, out, steps=turns.ENDLESS_STEPS, seed=7)
            threads = f"OMP_NUM_THREADS={options.threads} " if options.threads else ""
            program = f"{threads}exec {shlex.join(command)} > {shlex.quote(str(out / 'log.txt'))} 2>&1"
            ranks = 1 if key in ("pad", "group") else options.ranks
            contenders[key] = turns.start(CONTENDERS[key], program, out, ranks=ranks, cache=options.folder)
        turns.take_turns(list(contenders.values()), options.seconds, options.turn)
        plans = [json.loads(path.read_text()) for path in sorted(folder.glob("*/run/plan.json"))]
        return _tell(options, work, contenders, plans)
    finally:
        for contender in contenders.values():
            turns.end(contender)


def _tell(
    options: argparse.Namespace,
    work: encoder_work.Work,
    contenders: dict[str, turns.Contender],
    plans: Sequence[dict[str, Any]],
) -> int:
    mean = mean_tokens(work)
    figures = {key: figures_of(key, each, options.samples, mean) for key, each in contenders.items()}
    rates = {key: each.pop("samples_per_second_by_turn") for key, each in figures.items()}
    print(f"\na row has {mean:.0f} tokens in the mean\n")
    print("| contender | samples/s | real tokens/s | padding | utilization | CPU s of a sample | turns |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for key, contender in contenders.items():
        each = figures[key]
        plan = plans[0] if plans else None
        # Of everybody by the same count: arithmetic on real tokens over the calibrated rate of products.
        used = plan and each["tokens_per_second"] * plan["model_flops_per_token"] / plan["matmul_flops_per_second"]
        each["utilization"] = used
        print(
            f"| {contender.name} | {each['samples_per_second']:.2f} | {each['tokens_per_second']:.0f}"
            f" | {each['padding_fraction']:.3f} | {'' if used is None else f'{used:.1%}'}"
            f" | {each['cpu_seconds_per_sample']:.3f} | {len(rates[key])} |"
        )
    if "coremill" in rates:
        ratios = [
            turns.ratio(f"samples/s, coremill / {CONTENDERS[key]}", rates["coremill"], rates[key], target)
            for key, target in TARGETS.items()
            if rates.get(key) and rates["coremill"]
        ]
        print("\n" + results.ratio_table(ratios))
        print(f"\npadding_fraction of coremill: {figures['coremill']['padding_fraction']:.3f} (target <= 0.10)")
    if options.json:
        by_turn = {"samples_per_second_by_turn": rates}
        options.json.write_text(json.dumps({**_facts(options), "contenders": figures, **by_turn}, indent=1) + "\n")
    return 0 if all(rates.values()) else 1


def figures_of(key: str, contender: turns.Contender, samples: int, mean: float) -> dict[str, Any]:
    """Rates as if all samples were of the mean length: where a step costs what its tokens cost, a few turns may have
    had short ones; padded to the maximum all cost the same."""
    steps = [event for event in contender.events()[0] if event["kind"] == "step"]  # all ranks count all tokens
    tokens = [step["tokens"] for step in steps]
    padding = sum(step["padding_tokens"] for step in steps)
    amounts = [mean * samples] * len(steps) if key == "pad" else tokens
    sums = [0.0, *accumulate(amounts)]
    ends = contender.step_ends()[0]

    def done(moment: float) -> float:
        whole, part = divmod(turns.steps_done(ends, contender.turns, moment), 1)
        return sums[int(whole)] + part * (amounts[int(whole)] if int(whole) < len(amounts) else 0.0)

    known = [(since, to) for since, to in contender.turns[1:] if to < ends[-1]]
    by_turn = [(done(to) - done(since)) / (to - since) for since, to in known]
    rate = statistics.fmean(by_turn) if by_turn else float("nan")
    first, last = contender.awake
    ran = sum(after[0] - before[0] for before, after in zip(first, last, strict=True))
    in_all = done(min(contender.turns[-1][1], ends[-1])) - done(contender.turns[0][0])
    return {
        "samples_per_second": rate / mean,
        "tokens_per_second": rate,
        "padding_fraction": padding / (padding + sum(tokens)),
        "cpu_seconds_per_sample": ran / (in_all / mean) if in_all else float("nan"),  # of the compute threads
        "samples_per_second_by_turn": [each / mean for each in by_turn],
    }


def mean_tokens(work: encoder_work.Work) -> float:
    """Of a row: a token a word."""
    rows = [json.loads(line) for line in work.train.read_text().splitlines()]
    words = sum(len(row["question"].split()) + len(row["context"].split()) for row in rows)
    return words / len(rows) + encoder_work.SPECIAL_TOKENS


# -- metrics


def compare_metrics(options: argparse.Namespace, work: encoder_work.Work, folder: Path) -> int:
    """One after the other, to the end; three seeds each."""
    found: dict[str, list[dict[str, float]]] = {key: [] for key in options.only}
    for seed in range(1, options.seeds + 1):
        for key in options.only:
            out = folder / f"{key}-{seed}"
            out.mkdir()
            command = command_of(key, options, work, out, steps=options.steps, seed=seed, evaluates=True)
            finished = processes.run_tree(
                command,
                environment=peers.environment(options.folder),
                folder=peers.ROOT,
                log=out / "log.txt",
                timeout_seconds=options.timeout,
            )
            if finished.returncode != 0 or finished.timed_out:
                print(f"{key}, seed {seed}: failed with {finished.returncode}; see {finished.log}")
                return 1
            left = out / ("record.json" if key in ("pad", "group") else "run/report.json")
            metrics = json.loads(left.read_text())["metrics"]
            found[key].append({name: metrics[name] for name in ("exact_match", "f1")})
            print(f"{key}, seed {seed}: {found[key][-1]}, {finished.seconds:.0f} s", flush=True)
    print(f"\n{options.steps} steps of {options.samples} samples, learning rate {options.learning_rate:g}\n")
    print("| contender | F1 by seed | mean | exact match by seed | mean |\n|---|---|---:|---|---:|")
    for key, each in found.items():
        by_seed = {name: [metrics[name] for metrics in each] for name in ("f1", "exact_match")}
        cells = [
            f"{', '.join(f'{one:.1f}' for one in some)} | {statistics.fmean(some):.1f}" for some in by_seed.values()
        ]
        print(f"| {CONTENDERS[key]} | {' | '.join(cells)} |")
    if options.json:
        options.json.write_text(json.dumps({**_facts(options), "metrics": found}, indent=1) + "\n")
    return 0


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    names = ("shape", "dtype", "samples", "dropout", "questions", "ranks", "steps", "learning_rate")
    return {**{name: getattr(options, name) for name in names}, "load_average": os.getloadavg()[0]}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", choices=sorted(encoder_work.SHAPES), default="bert-base")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of all contenders (default fp32)")
    parser.add_argument("--samples", type=int, default=12, help="of a step (default 12, as run_qa's README has it)")
    parser.add_argument("--dropout", type=float, default=0.1, help="of hidden states and attention (default 0.1)")
    parser.add_argument("--questions", type=int, default=2000, help="to train on (default 2000)")
    parser.add_argument("--only", default=",".join(USUAL), help=f"some of {', '.join(CONTENDERS)}")
    parser.add_argument("--seconds", type=float, default=180.0, help="of turns, all together (default 180)")
    parser.add_argument("--turn", type=float, default=10.0, help="seconds of a turn (default 10)")
    parser.add_argument("--ranks", type=int, default=1, help="of coremill (default 1)")
    parser.add_argument("--engine", default="auto", help="of coremill: auto, replicate or shard")
    parser.add_argument("--threads", type=int, help="of each process (default: all cores)")
    parser.add_argument("--rows", type=int, help="of a forward pass of coremill (default: as it plans)")
    parser.add_argument("--metric", action="store_true", help="compare metrics after --steps steps instead of rates")
    parser.add_argument("--seeds", type=int, default=3, help="with --metric (default 3)")
    parser.add_argument("--steps", type=int, default=300, help="with --metric (default 300)")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each run with --metric")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="models, caches, logs")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    options = parser.parse_args(argv)
    options.only = options.only.split(",")
    if not set(options.only) <= set(CONTENDERS):
        parser.error(f"--only takes some of {', '.join(CONTENDERS)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
