"""Runs one command on one host for a launcher elsewhere, and ends it when that launcher is gone.

    ssh HOST python -m coremill.hosts.agent       first line of stdin: {"argv", "folder", "environ", "grace_seconds"}

ssh leaves a remote command alone when it is killed here. So the agent watches its standard input, which the launcher
holds open. The environment comes on the same way, off the command line: other users of the host read that.

    the stop word           the command is asked to end (SIGTERM), and has the time for it that the order gives; where
                            it `ends_itself` (a launcher, whose ranks may save for long), from its last sign of life
    the at-once word        it is told so (SIGINT, twice where it would take the first for the same press), and killed a
                            moment later
    the end of input        the launcher or the connection is lost: all is killed at once
    silence                 the same: a cut link ends no input, so where the order has `silence_seconds` the launcher
                            sends a byte now and then

Only the word is a request: a rank that is asked to stop takes all others with it, on all hosts, and a lost connection
must not end a run that can go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from coremill.child import read_line
from coremill.hardware.probe import environment_snapshot
from coremill.supervise.descendants import adopt_orphans, end_descendants
from coremill.supervise.process import exit_code_of, start_process
from coremill.supervise.waiting import wait_for_end
from coremill.world.stop import SAME_PRESS_SECONDS, StopSignals

STOP_WORD = b"stop"
AT_ONCE_WORD = b"at once"
AT_ONCE_SECONDS = 5.0  # for a launcher of ours to end its ranks and to say in the report how it ended
# So long after the request to end, a launcher of ours, however busy, takes SIGINT for another press.
SIGINT_AGAIN_SECONDS = SAME_PRESS_SECONDS + 0.5
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.5  # for signals and silence; the rest wakes it


def run_command(
    argv: list[str],
    folder: str,
    environ: dict[str, str],
    stdin: int,
    grace_seconds: float,
    silence_seconds: float | None = None,
    ends_itself: bool = False,
) -> int:
    """Run the command until it ends, is to end, or nobody is there who wants it; returns its exit code."""
    adopt_orphans()
    stop = StopSignals()
    stop.listen()
    lost, was_asked, at_once = "", False, False
    try:
        process = start_process(argv, environ, folder=folder)
    except OSError as error:
        print(f"coremill: cannot start {argv[0]} in {folder}: {error.strerror}", file=sys.stderr)
        return 127
    heard_at = time.monotonic()
    try:
        while process.poll() is None and stop.first is None and not was_asked and not lost:
            if wait_for_end([process.pid], _LOOK_SECONDS, or_input=stdin) == "input":
                heard_at = time.monotonic()
                heard = os.read(stdin, 4096)
                if STOP_WORD in heard:  # one write of a few bytes: it comes whole
                    was_asked, at_once = True, AT_ONCE_WORD in heard
                elif not heard:
                    lost = "the connection to the first host is lost"
            elif silence_seconds is not None and time.monotonic() - heard_at > silence_seconds:
                lost = f"no word from the first host for {silence_seconds:.0f} s"
    finally:
        was_asked = was_asked or stop.first is not None
        if lost:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):  # the other end may be gone
                print(f"coremill: {lost}: its ranks here are ended", file=sys.stderr, flush=True)
        elif was_asked and process.poll() is None:
            process.terminate()
            _wait_for_end(process, stdin, grace_seconds, ends_itself, at_once=at_once)
        code = process.poll()  # before our own wait() on all children could take it
        end_descendants(grace_seconds=0.0 if was_asked or lost else 1.0)
    if code is None:
        code = -signal.SIGKILL
    return exit_code_of(code)


def _wait_for_end(
    process: subprocess.Popen[bytes], stdin: int, grace_seconds: float, ends_itself: bool, *, at_once: bool
) -> None:
    """Until it has ended or its time is over, which the at-once word shortens; the end of input does not."""
    asked_at = time.monotonic()
    deadline, sleeps = asked_at + grace_seconds, _sleeps_of(process.pid)
    again_at: float | None = None
    is_open = True

    def end_at_once() -> None:
        nonlocal deadline, again_at, ends_itself
        process.send_signal(signal.SIGINT)
        again_at = time.monotonic() + SIGINT_AGAIN_SECONDS  # it may be late to both, and then counts them as one
        deadline, ends_itself = min(deadline, again_at + AT_ONCE_SECONDS), False

    if at_once:
        end_at_once()
    while process.poll() is None:
        if ends_itself and (now_sleeps := _sleeps_of(process.pid)) != sleeps:
            deadline, sleeps = time.monotonic() + grace_seconds, now_sleeps
        if time.monotonic() >= deadline:
            return
        if again_at is not None and time.monotonic() > again_at:
            process.send_signal(signal.SIGINT)
            again_at = time.monotonic() + SIGINT_AGAIN_SECONDS
        if wait_for_end([process.pid], _POLL_SECONDS, or_input=stdin if is_open else None) == "input":
            heard = os.read(stdin, 4096)
            is_open = bool(heard)
            if AT_ONCE_WORD in heard:
                end_at_once()


def _sleeps_of(pid: int) -> float:
    """How often its main thread went to sleep: a launcher that watches ranks does five times a second, one that is
    stopped or hangs does not. Where the kernel does not say, nobody is called hanging."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return time.monotonic()


def main() -> int:
    """Read the order from standard input and carry it out; the end of that input is how we learn of our parent's."""
    line = read_line(0)
    if not line.strip():
        return 0  # the launcher is gone already
    order = json.loads(line)
    environ = environment_snapshot()
    environ.update(order["environ"])
    silence, ends_itself = order.get("silence_seconds"), bool(order.get("ends_itself"))
    return run_command(order["argv"], order["folder"], environ, 0, float(order["grace_seconds"]), silence, ends_itself)


if __name__ == "__main__":
    sys.exit(main())
