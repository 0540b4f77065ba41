"""The fault experiments as one command: `python -m chaos [--short] [--only X1,X2] [--n N] [--set K=V] [--json FILE]`.

Each fault is done for real to a real run (or, where hundreds are wanted, to the bare store), and what came of it is one
row: fault, n, detected in, resumed in, steps lost, same bits, exit code. Exit code 0: every promise was kept. The JSON
file grows from go to go: an experiment that is run again replaces its own row only, so a night can be split.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from chaos import table
from chaos.catalogue import EXPERIMENTS
from chaos.experiment import COREMILL, SHORT_SEED, Experiment, Rig, Row, Trial
from chaos.running import write_settings_of_go
from coremill.hardware.probe import probe_node
from coremill.supervise.descendants import adopt_orphans, end_descendants

ROOT = Path(__file__).resolve().parent.parent
_Group = list[tuple[Experiment, int]]


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for; 0 where every promise was kept, 1 where one was not, 130 where it was interrupted."""
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    adopt_orphans()  # whatever a trial leaves behind can be found, and ended
    console = Console() if sys.stdout.isatty() else Console(width=200)
    session = arguments.folder.resolve() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    session.mkdir(parents=True)
    if arguments.set:
        write_settings_of_go(session / "shared", arguments.set)
    plan = [(each, _trials(each, arguments)) for each in arguments.experiments]
    expected = sum(experiment.expected_seconds(trials) for experiment, trials in plan)
    console.print(
        f"{len(plan)} experiments, {sum(trials for _, trials in plan)} trials, about {_minutes(expected)};"
        f" seed {arguments.seed}; logs in {session}",
        highlight=False,
        soft_wrap=True,
    )
    rows: list[Row] = []
    interrupted = False
    try:
        with _progress(console) as progress:
            screen = _Screen(progress, console, progress.add_task("", total=max(1.0, expected)))
            for group in _groups(plan):
                rows += (fresh := _run(group, arguments.seed, session, screen))
                if arguments.json:
                    table.merge(arguments.json, fresh)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what was done so far follows")
    finally:
        end_descendants(grace_seconds=3.0)
    console.print(table.screen(rows))
    known = table.read(arguments.json) if arguments.json and arguments.json.exists() else rows
    if arguments.markdown:
        table.write_markdown(arguments.markdown, known)
    bad = [row for row in rows if not row.is_good and row.system == COREMILL]
    for row in bad:
        for failure in row.failures[:5]:
            console.print(
                f"{row.key}: {failure['fault']}: {failure['outcome']}", highlight=False, markup=False, soft_wrap=True
            )
    if not bad and not interrupted:
        shutil.rmtree(session / "shared", ignore_errors=True)
    if not any(session.iterdir()):
        session.rmdir()
    return 130 if interrupted else int(bool(bad))


@dataclass
class _Screen:
    """The bar: expected seconds done, of all."""

    progress: Progress
    console: Console
    bar: TaskID
    done_seconds: float = 0.0

    def show(self, name: str, done: int, trials: int, share_seconds: float) -> None:
        """Inside an experiment."""
        self.progress.update(
            self.bar,
            description=f"{name} {done}/{trials}",
            completed=self.done_seconds + share_seconds * done / max(1, trials),
        )
        self.progress.refresh()


def _run(group: _Group, seed: int, session: Path, screen: _Screen) -> list[Row]:
    """The rows of experiments that run together; what breaks the experiment itself is a failed trial."""
    machine, began = _machine(), time.monotonic()
    rows: list[Row] = []
    wanted: dict[str, tuple[Experiment, int]] = {}
    for experiment, trials in group:
        if lacking := experiment.why_not():
            screen.console.print(f"{experiment.name}: not run: {lacking}", highlight=False, soft_wrap=True)
            rows.append(replace(Row.of(experiment, [], seconds=0.0, machine=machine), not_run=lacking))
        else:
            wanted[experiment.key] = (experiment, trials)
    share = sum(experiment.expected_seconds(trials) for experiment, trials in group)
    if wanted:
        name = "-".join(wanted) + group[0][0].system.removeprefix(COREMILL).replace(" ", "")
        folder = session / name
        folder.mkdir()
        found = _all_trials(wanted, Rig(folder, seed, session / "shared"), name, screen, share)
        seconds = time.monotonic() - began
        rows += [
            Row.of(each, found[key], seconds=seconds / len(wanted), machine=machine)
            for key, (each, _) in wanted.items()
        ]
        if all(row.is_good for row in rows):
            shutil.rmtree(folder, ignore_errors=True)
            (session / f"{name}.jsonl").unlink(missing_ok=True)
    screen.done_seconds += share
    if not screen.console.is_terminal:
        for row in rows:
            screen.console.print(" | ".join(table.cells(row)), highlight=False, markup=False, soft_wrap=True)
    return rows


def _all_trials(
    wanted: dict[str, tuple[Experiment, int]], rig: Rig, name: str, screen: _Screen, share_seconds: float
) -> dict[str, list[Trial]]:
    """By key, each written down as it comes; compared runs get their verdict at the end."""
    found: dict[str, list[Trial]] = {key: [] for key in wanted}
    total = sum(trials for _, trials in wanted.values())
    log = rig.folder.with_name(f"{name}.jsonl")
    rig.shared.mkdir(exist_ok=True)
    screen.show(name, 0, total, share_seconds)
    first = next(iter(wanted.values()))[0]
    try:
        trials = _campaign(first, wanted, rig)
        while True:
            key, trial = next(trials)
            found[key].append(trial)
            with log.open("a") as file:
                file.write(json.dumps({"key": key, **asdict(trial)}) + "\n")
            screen.show(name, sum(len(each) for each in found.values()), total, share_seconds)
    except StopIteration as end:
        if first.campaign is not None:
            _judge(found, end.value)
    except Exception:
        text = traceback.format_exc()
        log.with_suffix(".traceback").write_text(text)
        broken = Trial(passed=False, fault="the experiment itself", outcome=text.strip().splitlines()[-1])
        for trials_of_key in found.values():
            trials_of_key.append(broken)
    return found


def _campaign(
    first: Experiment, wanted: dict[str, tuple[Experiment, int]], rig: Rig
) -> Generator[tuple[str, Trial], None, str | None]:
    if first.campaign is not None:
        return (yield from first.campaign(rig, {key: trials for key, (_, trials) in wanted.items()}))
    assert first.run is not None
    for trial in first.run(rig, wanted[first.key][1]):
        yield first.key, trial
    return None


def _judge(found: dict[str, list[Trial]], difference: str | None) -> None:
    """One run bore all these faults: if it differs from the one left in peace, none of them kept the promise."""
    for trials in found.values():
        trials[:] = [
            replace(
                trial,
                same_bits=difference is None,
                passed=trial.passed and difference is None,
                outcome=trial.outcome if difference is None else f"{trial.outcome}; but {difference}",
            )
            if trial.is_compared
            else trial
            for trial in trials
        ]


def _groups(plan: list[tuple[Experiment, int]]) -> list[_Group]:
    """Experiments of one campaign together, in the place of the first."""
    groups: dict[object, _Group] = {}
    for experiment, trials in plan:
        groups.setdefault(experiment.campaign or experiment.name, []).append((experiment, trials))
    return list(groups.values())


def _trials(experiment: Experiment, arguments: argparse.Namespace) -> int:
    if arguments.n is not None:
        return int(arguments.n)
    return experiment.short_trials if arguments.short else experiment.long_trials


def _progress(console: Console) -> Progress:
    # Without a thread of its own: experiments fork.
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    )


def _machine() -> str:
    node = probe_node()
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    load = os.getloadavg()[0]
    return f"{node.cpu_model}, {node.usable_cores} cores, Python {platform.python_version()}, {libraries}" + (
        ", other work beside it" if load > 1.5 * node.usable_cores else ""
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="a few trials of each, as in make test-long")
    parser.add_argument("--only", help="experiments by name: X1,X2; X1@torchrun+FSDP2+DCP for a peer's")
    parser.add_argument("--systems", default=COREMILL, help="coremill, peers, or all (default coremill)")
    parser.add_argument("--n", type=int, help="trials of each experiment, instead of its own number")
    parser.add_argument("--seed", type=int, help="where and when faults fall (default: 20 with --short, else new)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run: lora.rank=4")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables into this page, between its marks")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "chaos", help="scratch (default runs/chaos)")
    parser.add_argument("--list", action="store_true", help="show the experiments and end")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for each in EXPERIMENTS:
            print(f"{each.name:6} n={each.short_trials}/{each.long_trials}  {each.fault}: {each.promise}")
        sys.exit(0)
    if arguments.seed is None:
        arguments.seed = SHORT_SEED if arguments.short else int(time.time())
    if arguments.only:
        names = [name for name in arguments.only.split(",") if name]
        known = {each.name: each for each in EXPERIMENTS}
        unknown = sorted(set(names) - set(known))
        if unknown:
            parser.error(f"no such experiment: {', '.join(unknown)}; --list shows them")
        arguments.experiments = [known[name] for name in names]
    else:
        wanted = {"coremill": (True,), "peers": (False,), "all": (True, False)}.get(arguments.systems)
        if wanted is None:
            parser.error("--systems is coremill, peers or all")
        arguments.experiments = [
            each
            for each in EXPERIMENTS
            if (each.system == COREMILL) in wanted and (not arguments.short or each.short_trials)
        ]
    if arguments.n is not None and arguments.n < 1:
        parser.error("--n starts at 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
