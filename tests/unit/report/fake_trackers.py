"""Trackers that misbehave, for test_trackers.py: each lives in a process of its own, as real ones do."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coremill.report.readers.trackers.base import About, Opened, Point, Tracker


class Good(Tracker):
    """Writes down what it is told, a JSON line each."""

    def open(self, about: About, folder: Path, run_id: str | None) -> Opened:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "told.jsonl"
        self._write("open", run_id, about.name)
        return Opened(run_id or "id-1", f"{folder}; to look: cat {self._file}")

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._write("log", point.step, dict(point.numbers))

    def note(self, lines: Sequence[str], step: int) -> None:
        self._write("note", step, list(lines))

    def close(self, summary: Mapping[str, Any]) -> None:
        self._write("close", summary["state"], summary["exit_code"])

    def _write(self, *words: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(words) + "\n")


class Rewinding(Good):
    """One that can forget."""

    can_rewind = True

    def forget_after(self, step: int) -> None:
        self._write("forget", step, None)


class FailsWhileTheRunGoesOn(Good):
    """Away when the first numbers come, and back when the run, of which more was written meanwhile, has ended."""

    has_failed = False

    def log(self, points: Sequence[Point]) -> None:
        if not self.has_failed:
            self.has_failed = True
            events = self._file.parents[2] / "events" / "rank-00000.jsonl"
            step = {"kind": "step", "time": points[-1].time + 1, "rank": 0, "step": points[-1].step + 1, "loss": 0.5}
            with events.open("a") as file:
                file.write(json.dumps(step | {"tokens": 10, "seconds": 1.0}) + "\n")
            raise ConnectionError("away")
        super().log(points)


class FailsAtFirst(Good):
    """A server that is away for a moment."""

    fails = 2

    def log(self, points: Sequence[Point]) -> None:
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the server is away, token hf_" + "x" * 16)
        super().log(points)


class Raises(Good):
    """Takes nothing."""

    def log(self, points: Sequence[Point]) -> None:
        raise ValueError("no")


class Hangs(Good):
    """Never answers, and has started a process that does not end either."""

    def log(self, points: Sequence[Point]) -> None:
        helper = subprocess.Popen(["sleep", "1000"])
        self._write("helper", helper.pid, os.getpid())
        threading.Event().wait()


class Slow(Good):
    """Takes each number, and its time."""

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            time.sleep(0.2)
            super().log([point])


class Dies(Good):
    """A library that ends the process."""

    def open(self, about: About, folder: Path, run_id: str | None) -> Opened:
        os._exit(3)
