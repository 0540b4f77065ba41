"""A child process dies with its parent: by its own word, or started through this file, any program.

Run as a script between fork and the program itself, so that it holds from the program's first instruction on:

    python -I -S child.py LAUNCHER_PID CPUS PROGRAM [ARGUMENT ...]        CPUS: 0,1,2 or - to leave the mask alone

A function run in the forked child would do the same, but may deadlock when the launcher has threads (it draws
progress). Standard library only, and little of it: this start costs about 20 ms per rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_COMMAND_NOT_FOUND = 127  # what shells say


def die_with_parent(parent_pid: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies, however that happens.

    Holds through exec, not for children. With `parent_pid` a parent that is already gone ends this process too.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent_pid is not None and os.getppid() != parent_pid:
        # It died before the call above: nobody would tell us.
        os.kill(os.getpid(), signal.SIGKILL)


def read_line(descriptor: int) -> bytes:
    """One line, and not a byte more: what follows on the pipe, or its end, is for somebody else. Short at its end."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return bytes(line)


def wrapped(argv: list[str], *, launcher_pid: int, cpus: frozenset[int] | None) -> list[str]:
    """The command that starts `argv` through this script."""
    mask = "-" if cpus is None else ",".join(str(cpu) for cpu in sorted(cpus))
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(launcher_pid), mask, *argv]


def _main(arguments: list[str]) -> None:
    launcher_pid, mask, *argv = arguments
    die_with_parent(int(launcher_pid))
    if mask != "-":
        os.sched_setaffinity(0, {int(cpu) for cpu in mask.split(",")})
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would hand that on
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"coremill: cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_COMMAND_NOT_FOUND)


if __name__ == "__main__":
    _main(sys.argv[1:])
