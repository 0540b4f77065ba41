"""The plan beside what happened: `python -m benchmarks.plan_table [--quick] [--preset NAME] [--out FILE]`.

Short runs through the documented command line, one after the other; of each the plan that `coremill train` made before
it started and the numbers its ranks left: peak resident memory per rank, bytes on the wire, step time. At the end, what
the time constants of plan/time.py would have to be multiplied with. Times mean something on a quiet machine only.

`--recorded FILE` runs nothing: it makes today's plans for runs measured earlier on a machine that is out of reach.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import encoder_cases, plan_cases, processes
from benchmarks.coremill_run import train_command
from benchmarks.encoder_cases import EncoderCase
from benchmarks.plan_cases import Case, Shape
from coremill.config.schema import RunConfig
from coremill.hardware.facts import Calibration, Core, NodeFacts
from coremill.hardware.instances import this_machine
from coremill.hardware.process_memory import MAPPED_FILE_BYTES
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "plan-table"
PRESETS: dict[str, tuple[Case | EncoderCase, ...]] = {
    "here": plan_cases.HERE,
    "amx": plan_cases.AMX,
    "lean": plan_cases.HERE_LEAN,
    "lean-amx": plan_cases.AMX_LEAN,
    "encoders": encoder_cases.HERE,
    "encoders-amx": encoder_cases.AMX,
}
STEPS = 3
TIMEOUT_SECONDS = 600.0
TIME_PARTS = ("compute", "communication", "optimizer")
GOALS = {"memory": (8.0, 4.0), "wire": (3.0, 3.0), "time": (20.0, 20.0)}  # percent: every run, median


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Predicted and measured numbers of one run."""

    name: str
    parameters: int
    engine: str
    ranks: int
    threads: int
    dtype: str
    checkpointing: bool
    keep_gathered: bool
    sequence_length: int
    micro_batch_rows: int
    passes: int
    vocabulary: int
    memory_planned_bytes: int
    memory_measured_bytes: int
    memory_phases_planned_bytes: dict[str, int]
    memory_phases_measured_bytes: dict[str, int]
    memory_parts_planned_bytes: dict[str, int]
    wire_planned_bytes: int
    wire_measured_bytes: int
    step_planned_seconds: float
    step_measured_seconds: float
    parts_planned_seconds: dict[str, float]
    parts_measured_seconds: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Planned over measured, in percent above or below."""
        pairs = {
            "memory": (self.memory_planned_bytes, self.memory_measured_bytes),
            "wire": (self.wire_planned_bytes, self.wire_measured_bytes),
            "time": (self.step_planned_seconds, self.step_measured_seconds),
        }
        return {
            kind: 100 * (planned / measured - 1) if measured else 0.0 for kind, (planned, measured) in pairs.items()
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, print and write the table."""
    options = _parse(arguments)
    if options.recorded:
        outcomes = read_recorded(options.recorded)
        _show(outcomes, f"--recorded {options.recorded}", options)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way is ended too
    cases = [case for case in PRESETS[options.preset] if case.quick or not options.quick]
    if options.only:
        cases = [case for case in cases if any(word in case.name for word in options.only.split(","))]
    outcomes, failed = [], []
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case.name} ...", end=" ", flush=True)
        outcome = run_case(case, options.steps)
        if isinstance(outcome, str):
            print(outcome, flush=True)
            failed.append(case.name)
            continue
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
        if options.json:  # after every run: a run that is stopped leaves what it has
            _write_json(options.json, outcomes)
    _show(outcomes, f"--preset {options.preset}", options)
    return 1 if failed else 0


def _show(outcomes: Sequence[Outcome], how: str, options: argparse.Namespace) -> None:
    text = render_memory(outcomes, f"{how} --memory") if options.memory else render(outcomes, how)
    print("\n" + text)
    if options.json:
        _write_json(options.json, outcomes)
    if options.out:
        options.out.write_text(text)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_table", description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="here", help="which list of runs")
    parser.add_argument("--recorded", type=Path, help="plan runs measured earlier (benchmarks/recorded/...json)")
    parser.add_argument("--quick", action="store_true", help="a few small runs")
    parser.add_argument("--only", default="", help="runs whose names hold one of these words, with commas")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--memory", action="store_true", help="memory alone: on a busy machine times mean nothing")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("--out", type=Path, help="write the table to this file (docs/plan-table.md)")
    return parser.parse_args(arguments)


def run_case(case: Case | EncoderCase, steps: int) -> Outcome | str:
    """One run; in words what went wrong otherwise."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    run = FOLDER / case.name.replace(" ", "-").replace(",", "")
    shutil.rmtree(run, ignore_errors=True)
    case.prepare()
    run_file, log = run.with_suffix(".yaml"), run.with_suffix(".log")
    run_file.write_text(case.run_file(run, steps))
    finished = processes.run_tree(
        [*train_command(run_file), "--fresh"],
        environment=processes.clean_environment({"PYTHONPATH": processes.python_path(ROOT / "src")}),
        folder=ROOT,
        log=log,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    if finished.returncode != 0 or finished.timed_out:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return f"failed with {finished.returncode}: {last[0]} (see {log})"
    try:
        return read_outcome(case.name, run)
    finally:
        shutil.rmtree(run / "export", ignore_errors=True)


def read_outcome(name: str, run: Path) -> Outcome:
    """The plan and the events that a run left."""
    config = json.loads((run / "orders.json").read_text())["model"]["config"]
    events = [
        json.loads(line)
        for file in sorted((run / "events").glob("rank-*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    steps = [event for event in events if event["kind"] == "step" and event["step"] > 1]
    of_rank_0 = [event for event in steps if event["rank"] == 0]
    measured_phases = {
        phase: max(
            (_peak_bytes(event) for event in events if _phase(event) == phase and "peak_rss_bytes" in event),
            default=0,
        )
        for phase in ("load", "first_step", "steady_step", "checkpoint")
    }
    plan = json.loads((run / "plan.json").read_text())
    # Of rows that differ in length a step has long ones or short ones: what is planned is their mean.
    middle = statistics.fmean if plan.get("row_lengths") else statistics.median
    seconds = {part: middle([event[f"{part}_seconds"] for event in of_rank_0]) for part in TIME_PARTS}
    return _outcome(
        name,
        plan,
        config["vocab_size"],
        phases=measured_phases,
        wire_bytes=int(statistics.median(_exchanged(event) for event in steps)),
        seconds={**seconds, "total": middle([event["seconds"] for event in of_rank_0])},
    )


def _exchanged(step: dict[str, Any]) -> int:
    """Sent, or read through memory that ranks share."""
    return int(step["wire_bytes"] + sum(use["shared_bytes"] for use in step["collectives"].values()))


def _peak_bytes(event: dict[str, Any]) -> int:
    """Its own memory, and as many pages of libraries as the plan counts: how many are mapped is the page cache's doing
    (hardware/process_memory.py)."""
    return int(event["peak_rss_bytes"] - event["mapped_file_bytes"]) + MAPPED_FILE_BYTES


def read_recorded(path: Path) -> list[Outcome]:
    """Today's plans for runs that were measured earlier, from what was known of their machine."""
    recorded = json.loads(path.read_text())
    node, calibration = recorded["node"], Calibration(**recorded["calibration"])
    cores = tuple(Core(**{**core, "cpus": tuple(core["cpus"])}) for core in node["cores"])
    facts = NodeFacts(**{**node, "cores": cores, "isa": tuple(node["isa"]), "interfaces": (), "allocators": ()})
    outcomes = []
    for run in recorded["runs"]:
        case = Case(**{**run["case"], "shape": Shape(**run["case"]["shape"])})
        config = RunConfig.model_validate(json.loads(case.run_file(Path("run"), STEPS)))
        card = read_card(config=case.shape.config(), pretrained=False)
        plan = make_plan(config, this_machine(facts, calibration), card, with_remedies=False)
        measured = run["measured"]
        outcomes.append(
            _outcome(
                case.name,
                plan.to_json(),
                case.shape.vocabulary,
                phases=measured["memory_bytes_by_phase"],
                wire_bytes=measured["wire_bytes_per_step_per_rank"],
                seconds=measured["step_seconds"],
            )
        )
    return outcomes


def _outcome(
    name: str,
    plan: dict[str, Any],
    vocabulary: int,
    *,
    phases: dict[str, int],
    wire_bytes: int,
    seconds: dict[str, float],
) -> Outcome:
    return Outcome(
        name=name,
        parameters=plan["memory_bytes_per_rank"]["optimizer"] // 8 * (plan["world_size"] if _shared(plan) else 1),
        engine=plan["engine"]["value"],
        ranks=plan["world_size"],
        threads=plan["threads_per_rank"]["value"],
        dtype=plan["dtype"]["value"],
        checkpointing=plan["activation_checkpointing"]["value"],
        keep_gathered=plan["keep_gathered"]["value"],
        sequence_length=plan["sequence_length"],
        micro_batch_rows=plan["micro_batch_rows"]["value"],
        passes=plan["accumulation_steps"]["value"],
        vocabulary=vocabulary,
        memory_planned_bytes=plan["memory_bytes_per_rank"]["total"],
        memory_measured_bytes=max(phases.values()),
        memory_phases_planned_bytes={phase: part["total"] for phase, part in plan["memory_by_phase"].items()},
        memory_phases_measured_bytes=phases,
        memory_parts_planned_bytes=plan["memory_bytes_per_rank"],
        wire_planned_bytes=plan["wire_bytes_per_step_per_rank"] + plan["shared_bytes_per_step_per_rank"],
        wire_measured_bytes=wire_bytes,
        step_planned_seconds=plan["step_seconds"]["total"],
        step_measured_seconds=seconds["total"],
        parts_planned_seconds={
            "compute": plan["step_seconds"]["compute"],
            "communication": plan["step_seconds"]["exposed_communication"],
            "optimizer": plan["step_seconds"]["optimizer"],
        },
        parts_measured_seconds={part: seconds[part] for part in TIME_PARTS},
    )


def _shared(plan: dict[str, Any]) -> bool:
    return plan["engine"]["value"] == "shard"


def _phase(event: dict[str, Any]) -> str | None:
    """Which phase of the plan an event belongs to."""
    if event["kind"] == "step":
        return "first_step" if event["step"] == 1 else "steady_step"
    if event["kind"] == "phase":
        return {"load": "load", "build": "load", "export": "checkpoint"}.get(event["name"])
    return None


def _line(outcome: Outcome) -> str:
    errors = outcome.errors
    return (
        f"memory {_megabytes(outcome.memory_planned_bytes)} / {_megabytes(outcome.memory_measured_bytes)} MB"
        f" ({errors['memory']:+.1f} %), wire {errors['wire']:+.1f} %,"
        f" step {outcome.step_planned_seconds:.2f} / {outcome.step_measured_seconds:.2f} s ({errors['time']:+.0f} %)"
    )


def render(outcomes: Sequence[Outcome], how: str) -> str:
    """The table as Markdown, planned / measured, with the medians of the errors and the factors for the constants."""
    lines = [
        f"Made by `python -m benchmarks.plan_table {how}`; planned / measured; rows x tokens of a row are"
        " those of one forward pass.",
        "",
        "| run | layout | rows x tokens | peak memory per rank, MB | error | wire per step and rank, MB | error"
        " | step, s | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        errors = one.errors
        keep = ", weights kept" if one.keep_gathered else ""
        passes = f", {one.passes} passes" if one.passes > 1 else ""
        lines.append(
            f"| {one.name} | {one.threads} threads, {one.dtype}{keep}"
            f"{', recomputing' if one.checkpointing else ''}{passes} | {one.micro_batch_rows} x {one.sequence_length}"
            f" | {_megabytes(one.memory_planned_bytes)} / {_megabytes(one.memory_measured_bytes)}"
            f" | {errors['memory']:+.1f} %"
            f" | {_megabytes(one.wire_planned_bytes)} / {_megabytes(one.wire_measured_bytes)}"
            f" | {errors['wire']:+.1f} % | {one.step_planned_seconds:.2f} / {one.step_measured_seconds:.2f}"
            f" | {errors['time']:+.0f} % |"
        )
    lines += ["", *_verdicts(outcomes), "", *_factors(outcomes)]
    return "\n".join(lines) + "\n"


def render_memory(outcomes: Sequence[Outcome], how: str) -> str:
    """The columns of memory alone."""
    lines = [
        f"Made by `python -m benchmarks.plan_table {how}`; planned / measured; rows x tokens of a row are"
        " those of one forward pass.",
        "",
        "| run | threads | rows x tokens | peak memory per rank, MB | error |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        lines.append(
            f"| {one.name} | {one.threads} | {one.micro_batch_rows} x {one.sequence_length}"
            f" | {_megabytes(one.memory_planned_bytes)} / {_megabytes(one.memory_measured_bytes)}"
            f" | {one.errors['memory']:+.1f} % |"
        )
    return "\n".join([*lines, "", *_verdicts(outcomes, ("memory",))]) + "\n"


def _verdicts(outcomes: Sequence[Outcome], kinds: Sequence[str] = tuple(GOALS)) -> list[str]:
    lines = ["| | median error | largest error | goal |", "|---|---|---|---|"]
    for kind in kinds:
        every, median = GOALS[kind]
        sizes = sorted(abs(one.errors[kind]) for one in outcomes)
        if sizes:
            goal = f"every run {every:g} %, median {median:g} %" if every != median else f"every run {every:g} %"
            lines.append(f"| {kind} | {statistics.median(sizes):.1f} % | {sizes[-1]:.1f} % | {goal} |")
    return lines


def _factors(outcomes: Sequence[Outcome]) -> list[str]:
    """Measured over planned, part by part: what a time constant is off by."""
    lines = ["| time | measured / planned, median | smallest | largest |", "|---|---|---|---|"]
    for part in TIME_PARTS:
        ratios = sorted(
            one.parts_measured_seconds[part] / one.parts_planned_seconds[part]
            for one in outcomes
            if one.parts_planned_seconds[part] > 1e-6
        )
        if ratios:
            lines.append(f"| {part} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |")
    return lines


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f}"


def _write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps([{**asdict(one), "errors_percent": one.errors} for one in outcomes], indent=1) + "\n")
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main())
