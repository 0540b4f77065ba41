"""The process of one tracker: reads the events of a run from their files and hands the numbers to the tracker.

    python -P -m coremill.report.readers.trackers.child LAUNCHER_PID NAME MODULE:CLASS RUN_FOLDER

    stdin   one JSON line at the end of the run: its state and exit code; the end of stdin says that nobody cares more
    stdout  JSON lines: ready (words, step), branched (words, step), delivered (step), trouble (text), done (step)
    stderr  RUN/logs/tracker-NAME.log, with whatever the library prints

The files are the queue: a tracker that is slow, away or hanging costs neither memory nor time elsewhere, and what it
has not taken when the run ends is sent by the next process for this run. How far it came is in RUN/trackers/NAME.json.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from coremill.child import die_with_parent
from coremill.config.load import load_config
from coremill.files import write_atomically
from coremill.hardware.probe import environment_snapshot, probe_node
from coremill.redaction import guard_output, redact
from coremill.report.events import EventFollower
from coremill.report.readers.trackers import TRACKERS_FOLDER
from coremill.report.readers.trackers.base import About, Point, Tracker
from coremill.report.readers.trackers.numbers import NumbersOfRun

POLL_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0  # between attempts at a tracker that fails
CHUNK_POINTS = 500
NICENESS = 5  # ranks come first

Tell = Callable[..., None]


@dataclass
class Progress:
    """What a tracker has, kept for the next process of the same run."""

    run_id: str | None = None
    time: float = 0.0  # of the newest event that was delivered
    done: dict[str, int] = field(default_factory=dict)  # train, eval: the newest step of each
    from_step: int | None = None  # the tracker's run is a branch: the step that it goes on from

    @staticmethod
    def read(path: Path) -> Progress:
        """As it was left; nothing where there is none, or a damaged one."""
        try:
            return Progress(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return Progress()


class Delivery:
    """Brings the numbers of one run to one tracker, in order, each once where the tracker allows it."""

    def __init__(self, tracker: Tracker, name: str, run_folder: Path, tell: Tell) -> None:
        self._tracker, self._run_folder, self._tell = tracker, run_folder, tell
        self._folder = run_folder / TRACKERS_FOLDER / name
        self._file = self._folder.with_suffix(".json")
        self._progress = Progress.read(self._file)
        self._since = self._progress.time  # older events are counted, not delivered
        self._about = about_run(run_folder)
        self._numbers = NumbersOfRun.of_plan(dict(self._about.plan))
        self._follower = EventFollower(run_folder)
        self._points: list[Point] = []  # read and not yet taken
        self._newest_step: Point | None = None  # of training, that was taken
        self._is_open = self._is_behind = False
        self._noted: list[str] = []
        self._troubles: set[str] = set()

    @property
    def step(self) -> int:
        """The newest that was delivered."""
        return self._progress.done.get("train", 0)

    def run(self, wait: Callable[[float], Mapping[str, Any] | None]) -> None:
        """Deliver until `wait`, which is given the seconds to wait, has the end of the run."""
        summary, pause = None, POLL_SECONDS
        while summary is None:
            summary = wait(pause)
            is_well = self._attempt(self._advance)
            pause = POLL_SECONDS if is_well else min(2 * pause, LONGEST_WAIT_SECONDS)
        if is_well and self._is_behind:
            self._attempt(self._advance)
        if not self._points and self._is_open and self._attempt(lambda: self._tracker.close(summary)):
            self._tell("done", step=self.step)

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:
            traceback.print_exc()
            text = " ".join(f"{type(error).__name__}: {error}".split())
            if text not in self._troubles:
                self._troubles.add(text)
                self._tell("trouble", text=redact(text))
            return False
        return True

    def _advance(self) -> None:
        if not self._is_open:
            self._open()
        self._is_behind = bool(self._points)  # from a failure: what came since waits in the files
        if not self._is_behind:
            points = [point for event in self._follower.poll() if (point := self._numbers.take(event)) is not None]
            self._points = [point for point in points if point.time > self._since]
            self._remember([point for point in points if point.time <= self._since])
        if self._points:
            self._deliver()
            write_atomically(self._file, json.dumps(asdict(self._progress)) + "\n")
            self._tell("delivered", step=self.step)
        if self._numbers.notes and self._numbers.notes != self._noted:
            self._tracker.note(self._numbers.notes, self.step)
            self._noted = list(self._numbers.notes)

    def _open(self) -> None:
        if self._progress.from_step is not None:
            self._about = self._about.going_back_to(self._progress.from_step)
        opened = self._tracker.open(self._about, self._folder, self._progress.run_id)
        self._is_open = True
        self._progress.run_id = opened.run_id
        for kind, step in opened.has.items():
            self._progress.done[kind] = max(step, self._progress.done.get(kind, 0))
        if self.step and self._tracker.can_rewind:  # it may have more than it was known to have
            self._tracker.forget_after(self.step)
        write_atomically(self._file, json.dumps(asdict(self._progress)) + "\n")
        self._tell("ready", words=redact(opened.words), step=self.step)

    def _deliver(self) -> None:
        while self._points:
            first, chunk = self._points[0], self._points[:CHUNK_POINTS]
            if first.goes_back_to is not None:
                self._go_back(first.goes_back_to)
                self._points[0] = replace(first, goes_back_to=None)
                continue
            stop = (at for at, one in enumerate(chunk) if one.goes_back_to is not None or self._has(one, chunk[:at]))
            size = next(stop, len(chunk))
            if size == 0 and self._tracker.can_rewind:
                self._rewind(first)
                continue
            if size == 0:
                del self._points[0]
                continue
            chunk = chunk[:size]
            self._tracker.log(chunk)
            del self._points[: len(chunk)]
            self._remember(chunk)
            self._progress.time = chunk[-1].time
            self._progress.done |= {point.kind: point.step for point in chunk}

    def _rewind(self, repeated: Point) -> None:
        """Forget a step that comes again, and later ones; of an evaluation that comes again its step stays."""
        before, newest = repeated.step - 1, self._newest_step
        self._tracker.forget_after(before)
        self._progress.done = {kind: min(step, before) for kind, step in self._progress.done.items()}
        if repeated.kind == "eval" and newest is not None and newest.step == repeated.step:
            self._tracker.log([newest])
            self._progress.done[newest.kind] = newest.step

    def _go_back(self, step: int) -> None:
        """The run goes on from this step another way: what was told of later ones is of the way it has left."""
        if self.step <= step:
            return  # nothing was told of later ones
        if self._tracker.can_rewind:
            self._tracker.forget_after(step)
            self._progress.done = {kind: min(done, step) for kind, done in self._progress.done.items()}
        elif self._tracker.can_branch:
            about = self._about.going_back_to(step)
            opened = self._tracker.branch(about, self._folder)
            self._about, self._progress.run_id, self._progress.from_step = about, opened.run_id, step
            self._progress.done = {"train": step, "eval": step - 1}  # a step gone back to may be evaluated again
            write_atomically(self._file, json.dumps(asdict(self._progress)) + "\n")
            words = f"a new run, {about.name}, for the run goes on from step {step} another way: {opened.words}"
            self._tell("branched", words=redact(words), step=step)

    def _remember(self, points: list[Point]) -> None:
        self._newest_step = next((point for point in reversed(points) if point.kind == "train"), self._newest_step)

    def _has(self, point: Point, just_now: list[Point]) -> bool:
        newest = [earlier.step for earlier in just_now if earlier.kind == point.kind]
        return point.step <= max([self._progress.done.get(point.kind, 0), *newest[-1:]])


def about_run(run_folder: Path) -> About:
    """From what the launcher left in the run folder before it started this process, and from this machine."""
    config = load_config(run_folder / "config.yaml").config.model_dump(mode="json")
    node = probe_node(busy_seconds=0)
    plan = json.loads((run_folder / "plan.json").read_text())
    hardware = {
        "hostname": node.hostname,
        "cpu_model": node.cpu_model,
        "usable_cores": node.usable_cores,
        "isa": " ".join(node.isa),
        "memory_total_bytes": node.memory_total_bytes,
        "fleet": plan.get("fleet"),
        "nodes": plan.get("nodes"),
    }
    text = redact((run_folder / "config.yaml").read_text())
    name = run_folder.name
    return About(name, json.loads(redact(json.dumps(config))), text, plan, hardware, group=name)


def _main(launcher_pid: str, name: str, implementation: str, run_folder: str) -> None:
    die_with_parent(int(launcher_pid))
    os.nice(NICENESS)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints goes to the log
    guard_output(environment_snapshot())
    try:
        module, _, class_name = implementation.partition(":")
        tracker: Tracker = getattr(importlib.import_module(module), class_name)()
        Delivery(tracker, name, Path(run_folder), _teller(out)).run(_end_of_run)
    except BrokenPipeError:
        pass  # the launcher has stopped listening


def _teller(out: IO[str]) -> Tell:
    def tell(kind: str, **values: Any) -> None:
        out.write(json.dumps({"kind": kind, **values}) + "\n")

    return tell


def _end_of_run(seconds: float) -> Mapping[str, Any] | None:
    """What the launcher says within so many seconds; None: nothing yet."""
    if not select.select([0], [], [], seconds)[0]:
        return None
    line = sys.stdin.readline()
    said: dict[str, Any] = json.loads(line) if line else {"state": "failed", "exit_code": 1}
    return said


if __name__ == "__main__":
    _main(*sys.argv[1:])
