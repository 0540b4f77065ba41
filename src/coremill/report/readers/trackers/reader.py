"""The launcher's side of the trackers: starts a process for each, says what it says, and ends it in bounded time.

Nothing here waits for a tracker while the run goes: messages are read where there are any. At the end all trackers
together have so many seconds, by how the run ended; then they are killed with whatever they started, and what they did
not take is said.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.errors import Interrupted, Stopped
from coremill.report.events import Event, events_folder
from coremill.report.readers.base import Reader
from coremill.report.readers.trackers import TRACKERS
from coremill.report.terminal import print_line

CHILD_MODULE = "coremill.report.readers.trackers.child"
FINISHED_SECONDS = 30.0  # MLflow takes 10 s to import on a busy machine
ENDED_SECONDS = 10.0  # stopped or failed: somebody waits for the machine, and a continuation sends the rest
AT_ONCE_SECONDS = 2.0
SAY_WAITING_SECONDS = 3.0
KILLED_SECONDS = 5.0  # a process in a hung file system never ends


@dataclass
class _Process:
    """One tracker as the launcher sees it."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    heard: bytes = b""  # up to a line that is not whole yet
    delivered_step: int = 0
    is_done: bool = False  # it has everything
    is_gone: bool = False


class TrackersReader(Reader):
    """All trackers of a run. `implementations`: MODULE:CLASS by name."""

    name = "run.trackers"

    def __init__(
        self,
        run_folder: Path,
        implementations: Mapping[str, str],
        console: Console,
        *,
        finished_seconds: float = FINISHED_SECONDS,
    ) -> None:
        self._run_folder, self._implementations, self._console = run_folder, implementations, console
        self._finished_seconds = finished_seconds
        self._processes: list[_Process] = []
        self._last_step = 0
        self._has_ended = False

    def begin(self) -> None:
        """Start them: each in a session of its own, so that Ctrl-C on the terminal is the launcher's."""
        for name, implementation in self._implementations.items():
            log = self._run_folder / "logs" / f"tracker-{name}.log"
            # -P: a folder "wandb" where the user works must not stand in for the library.
            argv = [sys.executable, "-P", "-m", CHILD_MODULE, str(os.getpid()), name, implementation]
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("ab") as words:
                    process = subprocess.Popen(
                        [*argv, str(self._run_folder)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=words,
                        start_new_session=True,
                    )
            except OSError as error:
                self._say(f"{name} could not be started: {error}; the run goes on without it")
                continue
            self._processes.append(_Process(name, process, log))
        atexit.register(self._end_all, {"state": "failed", "exit_code": 1}, AT_ONCE_SECONDS)

    def take(self, events: Iterable[Event]) -> None:
        """Count steps, to know what was not delivered, and look for messages."""
        for event in events:
            if event.kind == "step" and event.rank == 0:
                self._last_step = max(self._last_step, int(event.number("step")))
        self._listen(0.0)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Give them their time, end those that need more."""
        code = summary.get("exit_code")
        seconds = AT_ONCE_SECONDS if code == Interrupted.exit_code else ENDED_SECONDS
        self._end_all(summary, seconds if code else self._finished_seconds)

    def close(self, exit_code: int) -> None:
        """As after a second Ctrl-C: nobody waits for what is not there at once."""
        state = "stopped" if exit_code in (Stopped.exit_code, Interrupted.exit_code) else "failed"
        self._end_all({"state": state, "exit_code": exit_code}, AT_ONCE_SECONDS)

    def _end_all(self, summary: Mapping[str, Any], seconds: float) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        atexit.unregister(self._end_all)
        try:
            self._wait_for_all(_in_short(summary), seconds)
        finally:
            for one in self._processes:
                _kill(one.process)
        for one in self._processes:
            if not one.is_done:
                self._say_undelivered(one, seconds)

    def _wait_for_all(self, summary: Mapping[str, Any], seconds: float) -> None:
        line = json.dumps(summary).encode() + b"\n"
        for one in self._processes:
            assert one.process.stdin is not None
            with contextlib.suppress(OSError):  # it is gone
                os.write(one.process.stdin.fileno(), line)
        began, has_said = time.monotonic(), False
        while (waiting := self._running()) and (left := began + seconds - time.monotonic()) > 0:
            if not has_said and time.monotonic() - began > SAY_WAITING_SECONDS:
                has_said = True
                names = ", ".join(one.name for one in waiting)
                self._say(f"waiting for {names} to take the last numbers, {left:.0f} s at most")
            self._listen(min(left, 0.5))

    def _running(self) -> list[_Process]:
        return [one for one in self._processes if not one.is_gone]

    def _listen(self, seconds: float) -> None:
        """Take in what they said; waits so many seconds for a word where nobody has one."""
        by_pipe = {one.process.stdout.fileno(): one for one in self._running() if one.process.stdout is not None}
        for pipe in select.select(list(by_pipe), [], [], seconds)[0] if by_pipe else ():
            one, words = by_pipe[pipe], os.read(pipe, 65536)
            *lines, one.heard = (one.heard + words).split(b"\n")
            for line in lines:
                self._hear(one, json.loads(line))
            if not words:
                one.is_gone = True
                if not one.is_done and not self._has_ended:
                    self._say(f"{one.name} has ended, see {one.log}; the run goes on without it")

    def _hear(self, one: _Process, message: Mapping[str, Any]) -> None:
        one.delivered_step = message.get("step", one.delivered_step)
        if message["kind"] in ("ready", "branched"):
            self._say(f"{one.name}: {message['words']}")
        elif message["kind"] == "trouble":
            self._say(f"{one.name} failed, the run goes on: {message['text']}")
        one.is_done = message["kind"] == "done"

    def _say_undelivered(self, one: _Process, seconds: float) -> None:
        missing = self._last_step - one.delivered_step
        what = "a step" if missing == 1 else f"{missing:,} steps"
        lacks = f"{what} up to {self._last_step:,} did not get there" if missing > 0 else "all steps got there"
        why = "did not end well" if one.is_gone else f"was not done after {seconds:g} s and was ended"
        kept = events_folder(self._run_folder)
        self._say(f"{one.name} {why}: {lacks}; all numbers are in {kept}, what it said in {one.log}")

    def _say(self, text: str) -> None:
        print_line(self._console, text)


def _in_short(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the summary: small enough for a pipe to take at once."""
    return {key: value for key, value in summary.items() if isinstance(value, str | int | float | None)}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_SECONDS)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def trackers_of(run_folder: Path, names: Sequence[str], console: Console) -> TrackersReader:
    """Those that the run file names."""
    return TrackersReader(run_folder, {name: TRACKERS[name].implementation for name in names}, console)
