"""Ending a process together with everything it started, wherever that went: other sessions, other process groups.

The parent makes itself the one whom the kernel gives orphans to. What it started then stays findable, generation by
generation, in /proc. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time
from collections.abc import Collection, Container, Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_POLL_SECONDS = 0.05
_STRAYS_SECONDS = 10.0  # a process in a hung file system never ends
RANKS_OF = "COREMILL_RANKS_OF"  # in the environment of ranks and of what they start: whose they are
_TOKEN = secrets.token_hex(4)  # a launcher in another container may have the same number


def mark_of_ranks() -> dict[str, str]:
    """What ranks of this process are known by, with all that they start."""
    return {RANKS_OF: f"{os.getpid()}-{_TOKEN}"}


def adopt_orphans() -> None:
    """From now on processes below this one that lose their parent become children of this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def without_strays() -> Iterator[set[int]]:
    """What ranks started below this process within the block is gone after it, also what left its parent's session.

    Theirs is what carries the mark of ranks or is in one of the sessions that the block adds, with all below it. Any
    other process is some other part's of this program, a notebook's cell: it stays, and is not waited for.
    """
    sessions: set[int] = set()
    if sys.platform != "linux":
        yield sessions
        return
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    adopt_orphans()
    known = set(descendants(os.getpid()))
    try:
        yield sessions
    finally:
        deadline = time.monotonic() + _STRAYS_SECONDS
        while (strays := _of_ranks(sessions, descendants(os.getpid(), but=known))) and time.monotonic() < deadline:
            for pid in strays:
                _signal(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
            for pid in strays:  # not all of them at once: other children have somebody who waits for them
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _of_ranks(sessions: Collection[int], pids: list[int]) -> set[int]:
    """Of these processes those of ranks, and what is below them."""
    (mark,) = (f"{name}={value}".encode() for name, value in mark_of_ranks().items())
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it is gone, or somebody else's
            if os.getsid(pid) in sessions or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found |= {pid, *descendants(pid)}
    return found


def descendants(pid: int, *, but: Container[int] = ()) -> list[int]:
    """All living processes below one, children before grandchildren; without some and what is below these."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(folder.name))
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, []) if child not in but]
        found += level
    return found


def end_descendants(grace_seconds: float) -> None:
    """Ask all processes below this one to end, then kill those that are left, until none is; without grace, kill.

    A rank that hears a request has time to tell the others of it before it is killed: without grace none is made.
    """
    if grace_seconds > 0:
        for pid in descendants(os.getpid()):
            _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while (left := _left()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    # Twice and more: one may have been starting another meanwhile.
    deadline = time.monotonic() + _STRAYS_SECONDS
    while left and time.monotonic() < deadline:
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        left = _left()


def _left() -> list[int]:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # orphans became ours to wait for
            pass
    return descendants(os.getpid())


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
