"""1.24 billion parameters on one machine: `python -m benchmarks.billion [--only ranks,one,lean,trainer,zero3,save]`.

The shape of Llama-3.2-1B with random weights, rows of 512, 4096 tokens a step, in turn:

  ranks   coremill, the model sharded over four ranks that share the cores
  one     coremill, one process on all cores
  lean    the same with train.optimizer: adamw-8bit and train.update: inside
  trainer HF Trainer, one process on all cores
  zero3   HF Trainer with DeepSpeed ZeRO-3 on four ranks (needs deepspeed)
  save    coremill's four ranks again with a checkpoint in the middle: what saving costs the training loop

With `--in-turns SECONDS`, `ranks` and `one` run at once instead and take turns for so long (`benchmarks/turns.py`): on
a machine whose speed wavers by more than they differ.

Wants 16 cores and 100 GB of memory (`--shape 350M`: two and 24); in bf16 where the CPU has units for it. Prints
tokens per second, peak memory of the largest rank, ratios, and the cost of a save as a share of ten minutes; asserts
nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import coremill_run, peers, processes, results, turns
from benchmarks.plan_cases import B1, LEAN_INSIDE, M30, M350, Case

FOLDER = peers.ROOT / "runs" / "billion"
SHAPES = {"1.24B": B1, "350M": M350, "30M": M30}  # the second fits two cores and 24 GB, the last is to try the command
SEQUENCE_LENGTH = 512
TOKENS_PER_STEP = 4096
SAVE_INTERVAL_SECONDS = 600.0
STEPS_BEFORE_SAVE = 2
STEPS_AFTER_SAVE = 3
CONTENDERS = ("ranks", "one", "lean", "trainer", "zero3", "save")


@dataclass(frozen=True, kw_only=True)
class Found:
    """One contender in one round."""

    contender: str
    round: int
    tokens_per_second: float
    step_seconds: tuple[float, ...]
    peak_rss_bytes_per_rank: int
    ranks: int
    threads: int | None
    loss_last: float
    save: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Session:
    """What holds for the whole go."""

    folder: Path
    cache: Path
    shape: str
    ranks: int
    cores: int
    dtype: str
    steps: int
    timeout_seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 where a contender failed."""
    options = _parse(argv)
    signal.signal(signal.SIGTERM, peers.interrupt)
    cache = FOLDER.resolve()
    folder = cache / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    dtype, cores, machine = peers.describe_machine()
    session = Session(
        folder=folder,
        cache=cache,
        shape=options.shape,
        ranks=options.ranks,
        cores=cores,
        dtype=dtype,
        steps=options.steps + 1,
        timeout_seconds=options.timeout,
    )
    print(f"{machine}, {cores} cores, {dtype}, {options.shape} parameters; logs in {folder}", flush=True)
    if options.in_turns:
        return _take_turns(session, options)
    found: list[Found] = []
    failures: list[str] = []
    try:
        for number in range(1, options.rounds + 1):
            for name in options.only:
                print(f"round {number}/{options.rounds} {name}", flush=True)
                try:
                    found.append(_RUNNERS[name](session, name, number))
                    print(f"  {_line(found[-1])}", flush=True)
                except peers.ContenderFailed as failure:
                    failures.append(f"round {number}, {name}: {failure}")
                    print(f"  failed: {failure}", flush=True)
    except KeyboardInterrupt:
        failures.append("interrupted")
    print("\n" + "\n".join(_ratios(found)))
    document = {"machine": machine, **asdict(session), "found": [asdict(one) for one in found], "failures": failures}
    for target in filter(None, (folder / "billion.json", options.json)):
        target.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return 1 if failures else 0


def _take_turns(session: Session, options: argparse.Namespace) -> int:
    contenders: list[turns.Contender] = []
    try:
        for name, ranks in (("ranks", session.ranks), ("one", 1)):
            out = session.folder / name
            run_file = _run_file(session, out, name, ranks=ranks, steps=turns.ENDLESS_STEPS)
            program = f"exec {shlex.join(coremill_run.train_command(run_file))} >{shlex.quote(f'{out}.log')} 2>&1"
            contenders.append(turns.start(name, program, out, ranks=ranks, cache=session.cache))
        turns.take_turns(contenders, options.in_turns, options.turn)
    finally:
        for contender in contenders:
            turns.end(contender)
    rates = {contender.name: contender.tokens_per_second_by_turn(TOKENS_PER_STEP) for contender in contenders}
    print(f"\nturns of {options.turn:g} s; by step and rank, seconds of the compute thread:\n")
    print(turns.table(contenders, rates, TOKENS_PER_STEP))
    ratio = turns.ratio(f"tokens/s, {session.ranks} ranks / one process", rates["ranks"], rates["one"], ">= 0.95")
    print("\n" + results.ratio_table([ratio]))
    if options.json:
        document = {"tokens_per_second_by_turn": rates, "ratio": asdict(ratio)}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(rates.values()) else 1


def _run_file(session: Session, out: Path, name: str, *, ranks: int, steps: int, every: str = "never") -> Path:
    """What coremill is to run, its folder `out`."""
    case = Case(
        name=name,
        shape=SHAPES[session.shape],
        ranks=ranks,
        engine="shard" if ranks > 1 else "replicate",
        keep_gathered=False,
        sequence_length=SEQUENCE_LENGTH,
        tokens_per_step=TOKENS_PER_STEP,
        **(LEAN_INSIDE if name == "lean" else {}),
    )
    document = json.loads(case.run_file(out, steps))
    document["checkpoint"] = {"every": every}
    run_file = out.with_suffix(".yaml")
    run_file.write_text(json.dumps(document, indent=1))
    return run_file


def _coremill(session: Session, name: str, number: int, *, ranks: int, steps: int, every: str = "never") -> Path:
    """The run folder of a coremill run that ended well."""
    out = session.folder / f"{number}-{name}"
    run_file = _run_file(session, out, name, ranks=ranks, steps=steps, every=every)
    _run(session, coremill_run.train_command(run_file), out.with_suffix(".log"), {})
    return out


def _sharded(session: Session, name: str, number: int) -> Found:
    return _of_run(name, number, _coremill(session, name, number, ranks=session.ranks, steps=session.steps))


def _whole(session: Session, name: str, number: int) -> Found:
    return _of_run(name, number, _coremill(session, name, number, ranks=1, steps=session.steps))


def _of_run(name: str, number: int, run: Path) -> Found:
    report, steps = coremill_run.read_report(run), coremill_run.read_steps(run)
    return Found(
        contender=name,
        round=number,
        tokens_per_second=coremill_run.wall_tokens_per_second(steps) or 0.0,
        step_seconds=tuple(step["seconds"] for step in steps[1:]),
        peak_rss_bytes_per_rank=max(report["peak_rss_bytes_per_rank"]),
        ranks=len(report["peak_rss_bytes_per_rank"]),
        threads=results.threads_of(run),
        loss_last=report["loss_last"],
    )


def _trainer(session: Session, name: str, number: int) -> Found:
    return _peer(session, name, number, "benchmarks.contenders.trainer_ddp", ranks=1)


def _zero3(session: Session, name: str, number: int) -> Found:
    return _peer(session, name, number, "benchmarks.contenders.zero3_packed", ranks=session.ranks)


def _peer(session: Session, name: str, number: int, module: str, *, ranks: int) -> Found:
    out = session.folder / f"{number}-{name}"
    out.mkdir()
    work = peers.prepare_workload(session.cache, out / "workload.log", "13M")  # its rows; the model is another
    config_file = out / "config.json"
    config_file.write_text(json.dumps(SHAPES[session.shape].config()))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("-m", module, "--workload", work.folder, "--out", str(out)),
        *("--steps", str(session.steps), "--dtype", session.dtype, "--random-weights", str(config_file)),
        *("--rows-per-rank", str(TOKENS_PER_STEP // SEQUENCE_LENGTH // ranks)),
    ]
    _run(session, command, out / "log.txt", {"OMP_NUM_THREADS": str(max(1, session.cores // ranks))})
    records = [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
    seconds = tuple(max(each) for each in zip(*(record["step_seconds"] for record in records), strict=True))[1:]
    return Found(
        contender=name,
        round=number,
        tokens_per_second=TOKENS_PER_STEP * len(seconds) / sum(seconds),
        step_seconds=seconds,
        peak_rss_bytes_per_rank=max(record["peak_rss_bytes"] for record in records),
        ranks=len(records),
        threads=records[0]["threads"],
        loss_last=records[0]["losses"][-1],
    )


def _saving(session: Session, name: str, number: int) -> Found:
    """The first checkpoint's price: what the loop stood still for it, and what the steps beside it took longer."""
    first = 1 + STEPS_BEFORE_SAVE
    run = _coremill(session, name, number, ranks=session.ranks, steps=first + STEPS_AFTER_SAVE, every=f"{first}steps")
    found, steps = _of_run(name, number, run), coremill_run.read_steps(run)
    save = next(event for event in _events(run) if event["kind"] == "save" and event["step"] == first)
    if not save["saved"]:
        raise peers.ContenderFailed(f"the checkpoint was not saved: {save['reason']}; see {run}")
    usual = statistics.median(step["seconds"] for step in steps[1:first])
    # Steps that ended before the save was told, and the one that was under way.
    beside = [step for step in steps[first:] if step["time"] - step["seconds"] < save["time"]]
    slower = sum(step["seconds"] - usual for step in beside)
    cost = {
        "state_bytes": save["bytes"] * session.ranks,
        "usual_step_seconds": usual,
        "stood_seconds": save["blocked_seconds"],
        "written_after_seconds": save["seconds"],
        "slower_seconds": slower,
        "share_of_interval": (save["blocked_seconds"] + max(0.0, slower)) / SAVE_INTERVAL_SECONDS,
    }
    return Found(**{**asdict(found), "save": cost})


def _events(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events" / "rank-00000.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


_RUNNERS: dict[str, Callable[[Session, str, int], Found]] = {
    "ranks": _sharded,
    "one": _whole,
    "lean": _whole,
    "trainer": _trainer,
    "zero3": _zero3,
    "save": _saving,
}


def _run(session: Session, command: Sequence[str], log: Path, additions: dict[str, str]) -> None:
    finished = processes.run_tree(
        command,
        environment=peers.environment(session.cache, additions),
        folder=peers.ROOT,
        log=log,
        timeout_seconds=session.timeout_seconds,
    )
    if finished.timed_out or finished.returncode != 0:
        how = "over the time limit" if finished.timed_out else f"exit code {finished.returncode}"
        raise peers.ContenderFailed(f"{how}; see {log}")


def _line(found: Found) -> str:
    line = (
        f"{found.tokens_per_second:.0f} tokens/s, {found.peak_rss_bytes_per_rank / 1e9:.2f} GB in the largest of"
        f" {found.ranks} ranks x {found.threads} threads, loss {found.loss_last:.3f}, steps of"
        f" {', '.join(f'{seconds:.2f}' for seconds in found.step_seconds)} s"
    )
    if found.save is not None:
        cost = found.save
        line += (
            f"\n  a checkpoint of {cost['state_bytes'] / 1e9:.1f} GB: the loop stood for {cost['stood_seconds']:.2f} s,"
            f" the steps beside it took {cost['slower_seconds']:.2f} s longer, written after"
            f" {cost['written_after_seconds']:.1f} s: {cost['share_of_interval']:.1%} of ten minutes (target 2 %)"
        )
    return line


def _ratios(found: Sequence[Found]) -> list[str]:
    """Within a round, medians over rounds."""
    lines = []
    for text, above, below in (
        ("tokens/s, four ranks / one process (target 0.95)", "ranks", "one"),
        ("tokens/s, four ranks / HF Trainer in one process", "ranks", "trainer"),
        ("tokens/s, four ranks / ZeRO-3 (target 1.3)", "ranks", "zero3"),
        ("tokens/s, adamw-8bit inside backward / HF Trainer, both in one process", "lean", "trainer"),
    ):
        rounds = [
            one.tokens_per_second / other.tokens_per_second
            for one in found
            for other in found
            if (one.contender, other.contender) == (above, below) and one.round == other.round
        ]
        if rounds:
            lines.append(f"{text}: {statistics.median(rounds):.2f} ({', '.join(f'{each:.2f}' for each in rounds)})")
    return lines


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.billion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CONTENDERS), help="which, with commas (default all)")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1.24B", help="30M: to try the command")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="timed ones; the first is not")
    parser.add_argument("--timeout", type=float, default=600, help="seconds one contender may take")
    parser.add_argument("--in-turns", type=float, metavar="SECONDS", help="`ranks` and `one` take turns for so long")
    parser.add_argument("--turn", type=float, default=15.0, help="seconds of a turn (default 15)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    options = parser.parse_args(argv)
    options.only = [name for name in options.only.split(",") if name]
    if not options.only or set(options.only) - set(CONTENDERS):
        parser.error(f"--only takes {', '.join(CONTENDERS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
