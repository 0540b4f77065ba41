"""Requests to stop that come late: once the way out is decided, no signal changes it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The object outlives Python's own handling of signals: it goes in the last part of the interpreter's shutdown.
LEAVING = """
import os, sys
from coremill.launch.stop import StopRequests

class Late:
    def __del__(self, write=os.write, read=os.read):
        write(1, b"late\\n")
        read(0, 1)

sys.modules["kept"] = Late()
requests = StopRequests()
requests.listen()
requests.between_steps()
{decided}
os.write(1, b"saved\\n")
os.read(0, 1)
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("decided", "early"), [("requests.leave()", (signal.SIGINT, signal.SIGTERM)), ("", (signal.SIGTERM,))]
)
def test_a_rank_that_leaves_is_not_turned_round(decided: str, early: tuple[signal.Signals, ...]) -> None:
    command = [sys.executable, "-c", LEAVING.format(decided=decided)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for moment, numbers in ((b"saved\n", early), (b"late\n", (signal.SIGTERM, signal.SIGINT))):
            assert process.stdout.readline() == moment
            for number in numbers:
                process.send_signal(number)
            process.stdin.write(b"\n")
            process.stdin.flush()
        assert process.wait(timeout=120) == 75
