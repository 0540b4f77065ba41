"""Runs one command on one host for a launcher elsewhere, and ends it when that launcher is gone.

    ssh HOST python -m coremill.launch.keeper       first line of stdin: {"argv", "folder", "environ", "grace_seconds"}

ssh leaves a remote command alone when it is killed here. So the keeper watches its standard input, which the launcher
holds open: at its end, however that came about, everything the command started is ended. The environment comes on the
same way, off the command line: other users of the host read that. A cut link ends no input: where the order has
`silence_seconds`, the launcher sends a byte now and then, and without one for so long it counts as gone.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time

from coremill.hardware.probe import environment_snapshot
from coremill.launch.descendants import adopt_orphans, end_descendants
from coremill.launch.process import wrapped

_POLL_SECONDS = 0.1


def keep(
    argv: list[str],
    folder: str,
    environ: dict[str, str],
    stdin: int,
    grace_seconds: float,
    silence_seconds: float | None = None,
) -> int:
    """Run the command until it ends or `stdin` does, or is silent for too long; returns its exit code."""
    adopt_orphans()
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: stopped.append(received))
    try:
        process = subprocess.Popen(
            wrapped(argv, launcher_pid=os.getpid(), cpus=None),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        print(f"coremill: cannot start {argv[0]} in {folder}: {error.strerror}", file=sys.stderr)
        return 127
    heard_at = time.monotonic()
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_READ)
            while process.poll() is None and not stopped:
                if selector.select(_POLL_SECONDS):
                    heard_at = time.monotonic()
                    if not os.read(stdin, 4096):
                        stopped.append(signal.SIGTERM)
                elif silence_seconds is not None and time.monotonic() - heard_at > silence_seconds:
                    print(f"coremill: no word from the first host for {silence_seconds:.0f} s", file=sys.stderr)
                    stopped.append(signal.SIGTERM)
    finally:
        if stopped and process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + grace_seconds
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        code = process.poll()  # before our own wait() on all children could take it
        end_descendants(grace_seconds=0.0 if stopped else 1.0)
    if code is None:
        code = -signal.SIGKILL
    return code if code >= 0 else 128 - code


def _read_line(descriptor: int) -> bytes:
    """One line, and not a byte more: what follows tells when the launcher is gone."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def main() -> int:
    """Read the order from standard input and carry it out; the end of that input is how we learn of our parent's."""
    line = _read_line(0)
    if not line.strip():
        return 0  # the launcher is gone already
    order = json.loads(line)
    environ = environment_snapshot()
    environ.update(order["environ"])
    silence = order.get("silence_seconds")
    return keep(order["argv"], order["folder"], environ, 0, float(order["grace_seconds"]), silence)


if __name__ == "__main__":
    sys.exit(main())
