"""Runs one command per host, each under an agent, until all have ended; if one fails or we are stopped, ends them all.

The agents hang on our end of their standard input: a word on it asks what they run to end, and closing it, or our
death, ends it at once. So nothing is left on any host, whichever way this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from coremill.errors import InputError, PeerLost, Stopped
from coremill.hosts.agent import AT_ONCE_SECONDS, AT_ONCE_WORD, STOP_WORD
from coremill.hosts.ssh import Host, Remote
from coremill.supervise.output import Failure, Prefixer, first_failure, write_lines
from coremill.supervise.process import exit_code_of
from coremill.supervise.waiting import wait_for_end
from coremill.world.stop import StopSignals

POLL_SECONDS = 0.1  # for what no process's end tells
BLAME_SECONDS = 3.0  # a host whose ranks only lost their peers may end before the one that failed
# For a command that ends itself, and whose agent sees where it hangs: only an agent that hangs takes so long.
LONGEST_STOP_SECONDS = 24 * 3600.0
_AGENT_SECONDS = 4.0  # for the agent to do its work
_SSH_FAILED = 255


@dataclass(frozen=True, kw_only=True)
class HostCommand:
    """What runs on one host."""

    host: Host
    argv: tuple[str, ...]
    folder: Path
    environ: Mapping[str, str]  # added to what the host has
    grace_seconds: float = 8.0  # from the request to end, which torchrun and mpirun hand on to their ranks, to the kill
    ends_itself: bool = False  # `grace_seconds` count from its last sign of life only
    silence_seconds: float | None = None  # the host ends it after so long without a `beat`; None: never


@dataclass(frozen=True)
class HostsOutcome:
    """How it ended."""

    exit_code: int
    message: str = ""  # one line; empty where all went well
    last_words: str = ""  # of the first rank that failed


def run_on_hosts(commands: Sequence[HostCommand], remote: Remote) -> HostsOutcome:
    """Start all commands, relay what they print, and wait for them. Call it from the main thread."""
    runs: list[HostRun] = []
    with StopSignals() as stop:
        try:
            for command in commands:
                runs.append(HostRun(command, remote))
            _watch(runs, stop)
        finally:
            end_all(runs, at_once=stop.at_once)
    return outcome_of(runs, stop)


class HostRun:
    """One host agent, here or behind ssh, and what it says."""

    def __init__(self, command: HostCommand, remote: Remote) -> None:
        self.host = command.host
        self._command = command
        self.grace_seconds = LONGEST_STOP_SECONDS if command.ends_itself else command.grace_seconds + _AGENT_SECONDS
        self.failures: list[Failure] = []
        self.was_asked_to_end = False
        self.process = subprocess.Popen(
            remote.command(command.host, "coremill.hosts.agent"),
            env=dict(remote.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us only, and we end them in order
        )
        self._readers = [
            threading.Thread(target=self._relay, args=(source, target), daemon=True)
            for source, target in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        ]
        for reader in self._readers:
            reader.start()
        order = {
            "argv": list(command.argv),
            "folder": str(command.folder),
            "environ": dict(command.environ),
            "grace_seconds": command.grace_seconds,
            "ends_itself": command.ends_itself,
            "silence_seconds": command.silence_seconds,
        }
        with contextlib.suppress(BrokenPipeError):  # it ended at once: its exit code says why
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def beat(self) -> None:
        """Let it know that we are here."""
        self._send(b"\n")

    def _send(self, content: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it ended, or was asked to
            os.set_blocking(self.process.stdin.fileno(), False)
            os.write(self.process.stdin.fileno(), content)

    def ask_to_end(self) -> None:
        """Tell it that nobody wants it any more; it may save and tidy up."""
        if self.process.poll() is None and not self.was_asked_to_end:
            self.was_asked_to_end = True
            self._send(STOP_WORD + b"\n")

    def end_at_once(self) -> None:
        """Take back the time it was given."""
        self.ask_to_end()
        self.grace_seconds = AT_ONCE_SECONDS + _AGENT_SECONDS
        self._send(AT_ONCE_WORD + b"\n")

    def let_go(self) -> None:
        """Leave it alone: what it keeps is ended at once, unless it was asked to end before."""
        if self.process.poll() is None and not self.was_asked_to_end:
            self.was_asked_to_end = True
            self.grace_seconds = self._command.grace_seconds + _AGENT_SECONDS  # it does not save
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def kill(self) -> None:
        """End it, with some patience."""
        self.ask_to_end()
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=self.grace_seconds)
            self.process.kill()
            self.process.wait()
        self.read_to_the_end()

    def read_to_the_end(self) -> None:
        """Take in what it said last; only once it has ended."""
        for reader in self._readers:
            reader.join(timeout=2)

    def _relay(self, source: IO[bytes] | None, target: IO[str]) -> None:
        assert source is not None
        lines = Prefixer(None)
        while chunk := os.read(source.fileno(), 65536):
            self._show(lines.feed(chunk), target)
        self._show(lines.rest(), target)

    def _show(self, content: bytes, target: IO[str]) -> None:
        if b"\x1e" in content:
            kept = []
            for line in content.splitlines(keepends=True):
                failure = Failure.from_line(line)
                if failure is not None:
                    self.failures.append(failure)
                else:
                    kept.append(line)
            content = b"".join(kept)
        write_lines(target.fileno(), content)


def running_pids(runs: Sequence[HostRun]) -> list[int]:
    return [run.process.pid for run in runs if run.process.poll() is None]


def end_all(runs: Sequence[HostRun], *, at_once: bool) -> None:
    """Leave nothing on any host."""
    if at_once:
        for run in runs:
            run.end_at_once()
    for run in runs:
        run.kill()


def _watch(runs: Sequence[HostRun], stop: StopSignals) -> None:
    """Until all have ended; a failure or a request to stop ends the others."""
    end_at: float | None = None
    while pids := running_pids(runs):
        # MPICH leaves the other ranks alone when one exits badly; a rank's own word of its failure is enough.
        told = [failure for run in runs for failure in run.failures if failure.exit_code != Stopped.exit_code]
        failed = bool(told) or any(run.process.poll() for run in runs)
        asked = stop.first is not None
        if end_at is None and (failed or asked):
            end_at = time.monotonic() + (0.0 if asked else BLAME_SECONDS)
        if asked and end_at is not None:
            end_at = min(end_at, time.monotonic())
        if end_at is not None and time.monotonic() >= end_at:
            for run in runs:
                run.ask_to_end()
        if stop.at_once or (end_at is not None and time.monotonic() > end_at + max(run.grace_seconds for run in runs)):
            return
        wait_for_end(pids, POLL_SECONDS)


def outcome_of(runs: Sequence[HostRun], stop: StopSignals) -> HostsOutcome:
    codes = [run.process.returncode or 0 for run in runs]
    failures = [failure for run in runs for failure in run.failures]
    if stop.at_once:
        return HostsOutcome(stop.exit_code, "stopped at once (Ctrl-C)")
    for run, code in zip(runs, codes, strict=True):
        if code == InputError.exit_code and not run.was_asked_to_end and not run.failures:  # it said why itself
            return HostsOutcome(code, f"host {run.host.name}: the command ended with exit code {code}")
    if any(failure.exit_code == Stopped.exit_code for failure in failures):
        return HostsOutcome(Stopped.exit_code, "stopped on request, saved")
    if stop.first is not None:
        return HostsOutcome(stop.exit_code, f"stopped on request ({stop.name})")
    failure = first_failure(failures)
    if failure is not None:
        how = f"failed with exit code {failure.exit_code}"
        if failure.signal is not None:
            how = f"was ended by {signal.Signals(failure.signal).name}"
        where = "" if failure.host == socket.gethostname() and len(runs) == 1 else f" on {failure.host}"
        return HostsOutcome(failure.exit_code, f"rank {failure.rank}{where} {how}", failure.tail)
    for run, code in zip(runs, codes, strict=True):
        if code == _SSH_FAILED and not run.host.is_here and not run.was_asked_to_end:
            return HostsOutcome(PeerLost.exit_code, f"host {run.host.name}: the connection was lost")
    for run, code in zip(runs, codes, strict=True):
        if code and not run.was_asked_to_end:
            message = f"host {run.host.name}: the command ended with exit code {code}"
            return HostsOutcome(exit_code_of(code), message)
    return HostsOutcome(0)
