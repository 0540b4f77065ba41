"""One rank as its launcher sees it: how it starts, its process, what is known of its end, and its last words.

started by  for                                         takes
fork        `coremill train`'s own ranks                what a fork takes: all is imported already
exec        any other program; no fork server, or dead  a Python of its own and its imports, 7 s for torch
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from coremill.errors import PeerLost, StorageError
from coremill.hardware.cgroup import read_cgroup_limits, read_cgroup_memory
from coremill.supervise.fork_client import CannotFork, ForkServer
from coremill.supervise.fork_server import RankStart
from coremill.supervise.process import Process, exit_code_of, signal_group, start_process
from coremill.supervise.stuck import Stuck
from coremill.world.lost_peers import is_follower

UNKILLABLE_SECONDS = 60.0  # a process that hangs in a file system outlives SIGKILL; a busy machine takes 10 s for it
LOG_TAIL_BYTES = 16384

_MEANINGS = {
    69: "it lost the connection to other ranks",
    70: "its numbers cannot be trusted",
    74: "storage",
    78: "bad config or input",
    127: "the command was not found",
}


def start_rank(start: RankStart, log: IO[bytes], fork_server: ForkServer | None) -> Process:
    """A child of this process in a session of its own, which dies with it."""
    if fork_server is not None:
        with contextlib.suppress(CannotFork):
            return fork_server.fork(start, log)
    return start_process(
        start.argv,
        start.environ,
        cpus=None if start.cpus is None else frozenset(start.cpus),
        stdout=log,
        stderr=subprocess.STDOUT,
        descriptors=start.descriptors,
    )


class RankProcess:
    """One process and what is known of its end."""

    def __init__(self, rank: int, process: Process, log_file: Path, log_begin: int) -> None:
        self.rank = rank
        self.log_file = log_file
        self.ended_at = 0.0
        self.unseen_seconds = 0.0
        self.was_asked_to_end = False
        self.stuck: Stuck | None = None
        self._log_begin = log_begin  # an earlier attempt may have written before that
        self._seen_at = time.monotonic()
        self._process = process

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """None once it has ended."""
        return self._process.pid if self.is_running else None

    @property
    def failed(self) -> bool:
        """Ended badly, and not because we asked it to end."""
        return bool(self.exit_code) and not self.was_asked_to_end

    @property
    def only_followed(self) -> bool:
        """Ended because another rank did, by its exit code or by what it says in its log."""
        return self.exit_code == PeerLost.exit_code or is_follower(self.log_tail())

    def poll(self) -> None:
        """See whether it has ended; its own children are then ended too.

        They hold its sockets: with one left the other ranks would wait for a rank that is gone. The group is signalled
        before the rank is reaped, while its number cannot have been given to anybody else.
        """
        if self.is_running and os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            signal_group(self._process, signal.SIGKILL)
            self._process.wait()
            self.ended_at = time.monotonic()
            self.unseen_seconds = self.ended_at - self._seen_at
        self._seen_at = time.monotonic()

    def is_stuck(self, stuck: Stuck) -> None:
        """It does not end by itself: it is ended now, and is the one to blame."""
        self.kill()
        self.stuck = stuck
        self.ended_at, self.unseen_seconds = time.monotonic(), stuck.silent_seconds

    def ask_to_end(self) -> None:
        if self.is_running:
            self.was_asked_to_end = True
            signal_group(self._process, signal.SIGTERM)

    def kill(self, wait_seconds: float = UNKILLABLE_SECONDS) -> None:
        if self.is_running:
            self.was_asked_to_end = True
            signal_group(self._process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_seconds)

    def log_tail(self) -> str:
        with self.log_file.open("rb") as log:
            log.seek(max(self._log_begin, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


def end_all(ranks: Iterable[RankProcess]) -> None:
    """Kill those that still run: all are told before any is waited for, since giving gigabytes back takes a moment."""
    running = [rank for rank in ranks if rank.is_running]
    for rank in running:
        rank.kill(wait_seconds=0.0)
    for rank in running:
        rank.kill()


def explained(culprit: RankProcess, kills: int = 0) -> tuple[int, str, int | None]:
    """Exit code, one line, and the signal of a rank that failed."""
    if culprit.stuck is not None:
        code = StorageError.exit_code if culprit.stuck.by_storage else PeerLost.exit_code
        return code, f"rank {culprit.rank} {culprit.stuck.text}", None
    code = culprit.exit_code or 0
    if code >= 0:
        meaning = f": {_MEANINGS[code]}" if code in _MEANINGS else ""
        return code, f"rank {culprit.rank} failed with exit code {code}{meaning}", None
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    note = memory_note(kills) if -code == signal.SIGKILL else ""
    return exit_code_of(code), f"rank {culprit.rank} was ended by {name}{note}", -code


def memory_kills(root: Path = Path("/")) -> int:
    """Processes the out-of-memory killer has ended so far, in this cgroup where it counts, else on this machine: what
    tells a rank that it killed from one that somebody killed, for both end by SIGKILL.

    Ranks live in the cgroup of their launcher. The machine's own counter (since boot) counts all processes, but is
    there where cgroups do not tell: at their root, and in version 1 before kernel 4.13.
    """
    counted = read_cgroup_memory(root).kills
    if counted is not None:
        return counted
    try:
        lines = (root / "proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def memory_note(kills: int, *, rank_peak_bytes: int | None = None, planned_bytes: int | None = None) -> str:
    """What to add about a rank ended by SIGKILL, where the kernel counted `kills` meanwhile: limit, peak and plan."""
    if kills <= 0:
        return ""
    limit, peak = read_cgroup_limits().memory_limit_bytes, read_cgroup_memory().peak_bytes
    facts = (
        ("the limit here is {}", limit),
        ("all processes under it together reached {}", peak),
        ("this rank had reached {}", rank_peak_bytes),
        ("the plan was {} per rank", planned_bytes),
    )
    known = "".join(f"; {words.format(f'{size / 1e9:.2f} GB')}" for words, size in facts if size)
    return f": out of memory (the kernel killed {kills} for it during the run{known})"
