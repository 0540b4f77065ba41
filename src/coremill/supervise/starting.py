"""The two ways to start a rank: forked by the fork server, or as a program of its own.

by        for                                         takes
fork      `coremill train`'s own ranks                what a fork takes: all is imported already
exec      any other program; no fork server, or dead  a Python of its own and its imports, 7 s for torch
"""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from typing import IO

from coremill.supervise.fork_client import CannotFork, ForkServer
from coremill.supervise.fork_server import ForkOrder
from coremill.supervise.process import Process, start_process


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """All that a rank is born with, besides its log."""

    name: str
    argv: tuple[str, ...]
    environ: dict[str, str]
    cpus: frozenset[int] | None  # None: the mask stays as it is
    descriptors: tuple[int, ...]  # handed on, for the environment names them


def start_rank(start: RankStart, log: IO[bytes], fork_server: ForkServer | None) -> Process:
    """A child of this process in a session of its own, which dies with it."""
    if fork_server is not None:
        order = ForkOrder(
            name=start.name,
            argv=list(start.argv),
            environ=start.environ,
            cpus=None if start.cpus is None else sorted(start.cpus),
            descriptors=list(start.descriptors),
        )
        with contextlib.suppress(CannotFork):
            return fork_server.fork(order, log)
    return start_process(
        start.argv,
        start.environ,
        cpus=start.cpus,
        stdout=log,
        stderr=subprocess.STDOUT,
        descriptors=start.descriptors,
    )
