"""A child process as launchers, agents and the rank shim have it: in a session of its own, so that Ctrl-C on the
terminal reaches its parent only, and dying with its parent, even if that is killed. How it ended is said as shells say
it. Standard library only, but for child.py, which it starts through.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from coremill.child import wrapped

POLL_SECONDS = 0.05


class Process(Protocol):
    """A child of this process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None until it was waited for; negative: the signal that ended it."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises subprocess.TimeoutExpired."""

    def send_signal(self, number: int, /) -> None:
        """To it alone, not its group."""


def start_process(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    folder: str | Path | None = None,
    cpus: frozenset[int] | None = None,  # None: the mask stays as it is
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    descriptors: Sequence[int] = (),  # handed on
) -> subprocess.Popen[bytes]:
    """Call it from the thread that it is to die with. Raises OSError where there is no such folder; a
    program that is not there ends with 127."""
    return subprocess.Popen(
        wrapped(list(argv), launcher_pid=os.getpid(), cpus=cpus),
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=descriptors,
        start_new_session=True,
    )


class ForkedProcess:
    """A child that this process adopted: what `subprocess.Popen` is to one that it started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG if deadline is not None else 0)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout or 0.0)
            elif deadline is not None:
                time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def signal_group(process: Process, number: signal.Signals) -> None:
    """To it and to what it started, but for what left its session."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # it has not become a group of its own yet, or holds only zombies
        process.send_signal(number)


def exit_code_of(returncode: int) -> int:
    """As shells count: 128 and the signal's number where one ended the process."""
    return returncode if returncode >= 0 else 128 - returncode
