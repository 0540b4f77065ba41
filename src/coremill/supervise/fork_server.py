"""What runs in the fork server: it has imported what a rank needs, and forks a rank per order of the launcher.

    launcher                                    fork server                    rank
    (length, order, descriptors)   ------>      forks twice        ------>     gets a session, cores, environment, log
    (length, {"pid": ...})         <------      child in between ends: the rank is the launcher's own child now
    a byte through a pipe                       ------------------------->     begins; without it, it ends

Forked twice, because the launcher adopts orphans: so it waits for such a rank, and signals it, as for one that it
started itself, and the fork server may die without anybody noticing. It has one thread: a lock that another one
holds at the moment of a fork stays locked in the child for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.child import die_with_parent
from coremill.hardware.probe import replace_environment
from coremill.world.heartbeat import HEARTBEAT_FD
from coremill.world.identity import STORE_FD

# Held back from before the fork until the rank listens (world/stop.py): none is lost, and none kills it unheard.
HELD_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
MOST_DESCRIPTORS = 8
LEAVE_TO_BEGIN = b"."
_LENGTH = struct.Struct("!I")
_PR_SET_NAME = 15
_ADOPTION_POLL_SECONDS = 0.0005
# Of 1000, which stands for all memory. It is by a rank that memory gets short, but a young one is smaller than
# the fork server: where that were killed instead, nobody would be blamed, and the next start would import all
# of it anew.
_RATHER_THAN_SERVER = 100


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """All that a rank is born with, besides its log; travels as JSON."""

    name: str  # as `top` shows it
    argv: list[str]
    environ: dict[str, str]
    cpus: list[int] | None  # None: the mask stays as it is
    descriptors: list[int]  # handed on: the launcher's numbers, as the environment names them


def send(connection: socket.socket, document: dict[str, Any], descriptors: list[int] | None = None) -> None:
    body = json.dumps(document).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(body))], descriptors or [])
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message; None where the other end is closed."""
    with contextlib.suppress(ConnectionError):
        head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, MOST_DESCRIPTORS)
        head += _read(connection, _LENGTH.size - len(head))
        body = _read(connection, _LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
        if body:
            return json.loads(body), descriptors
    return None


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size and (part := connection.recv(size - len(parts))):
        parts += part
    return bytes(parts) if len(parts) == size else b""


def serve(connection: socket.socket, launcher_pid: int) -> RankStart | None:
    """Say that this process is ready, then fork a rank per order. Returns in each rank with its order, everything in
    place; in the fork server it returns None, when the launcher wants no more."""
    gc.freeze()  # what is there now is never looked at again: its pages stay shared with the ranks
    gc.enable()  # the fork server imports without (forked_rank.py)
    send(connection, {"ready": True})
    while (message := receive(connection)) is not None:
        order, (log, leave, *descriptors) = RankStart(**message[0]), message[1]  # these two come first
        answer: dict[str, Any]
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            answer = {"error": f"it has {threads} threads, and only a process with one may fork"}
        else:
            try:
                pid = _fork_twice()
            except OSError as error:
                answer = {"error": f"it cannot fork: {error.strerror}"}
            else:
                if pid == 0:
                    connection.close()
                    _await_leave(leave, launcher_pid)
                    _become(order, log, descriptors)
                    return order
                answer = {"pid": pid}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
        for descriptor in (log, leave, *descriptors):
            os.close(descriptor)
        send(connection, answer)
    return None


def _fork_twice() -> int:
    """0 in the rank; in the fork server the rank's number, when it has been adopted by the launcher."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    reader, writer = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _fork_and_leave(writer)
            return 0
        os.close(writer)
        writer = -1
        number = int(os.read(reader, 32) or b"-1")
        os.waitpid(between, 0)  # orphans are adopted before their parent can be waited for
    finally:
        for descriptor in (reader, writer):
            if descriptor >= 0:
                os.close(descriptor)
    if number < 0:
        raise OSError(-number, os.strerror(-number))
    return number


def _fork_and_leave(writer: int) -> None:
    """In between: tell the rank's number and end. Returns in the rank, when it has been adopted."""
    between_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid != 0:
        try:
            os.write(writer, str(pid).encode())
        finally:
            os._exit(0)
    os.setsid()
    while os.getppid() == between_pid:
        time.sleep(_ADOPTION_POLL_SECONDS)


def _await_leave(leave: int, launcher_pid: int) -> None:
    """Until the launcher knows of this process. One that has waited too long for the fork server's answer has started
    another in its place: then it closes the pipe, and this one ends before it has done anything."""
    die_with_parent(launcher_pid)
    if not os.read(leave, len(LEAVE_TO_BEGIN)):
        os._exit(0)
    os.close(leave)


def _become(order: RankStart, log: int, descriptors: list[int]) -> None:
    """This process is a rank from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, order.name.encode()[:15], 0, 0, 0)
    _offer_to_memory_killer()
    if order.cpus is not None:
        os.sched_setaffinity(0, order.cpus)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    replace_environment(renumbered(order.environ, dict(zip(order.descriptors, descriptors, strict=True))))
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # as in a fresh process; Python's own generator does so by itself


def _offer_to_memory_killer() -> None:
    """Have the kernel take a rank first where memory is short; a process may always make itself easier prey."""
    own = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        own.write_text(str(min(1000, int(own.read_text()) + _RATHER_THAN_SERVER)))


def renumbered(environ: dict[str, str], numbers: dict[int, int]) -> dict[str, str]:
    """The environment with the descriptors it names under the numbers they have in this process."""
    changed = dict(environ)
    for name in (STORE_FD, HEARTBEAT_FD):
        if name in changed:
            number, colon, rest = changed[name].partition(":")
            changed[name] = f"{numbers[int(number)]}{colon}{rest}"
    return changed
