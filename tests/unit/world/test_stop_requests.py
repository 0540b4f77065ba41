"""Requests to stop: one press is one however often it arrives, and once the way out is decided none changes it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from coremill.errors import Interrupted
from coremill.world import stop
from coremill.world.stop import SAME_PRESS_SECONDS, StopRequests, StopSignals

# The object outlives Python's own handling of signals: it goes in the last part of the interpreter's shutdown.
LEAVING = """
import os, sys
from coremill.world.stop import StopRequests

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_press_that_arrives_twice_is_one(clock: list[float], first: signal.Signals) -> None:
    requests, signals = StopRequests(), StopSignals()
    requests.between_steps()

    def arrives(number: signal.Signals) -> None:
        requests._take(number, None)
        signals._take(number, None)

    arrives(first)
    for number in (signal.SIGINT, signal.SIGTERM):  # a wrapper passes on what the terminal sent to all
        clock[0] += SAME_PRESS_SECONDS / 4
        arrives(number)
    assert (signals.first, signals.at_once, signals.exit_code) == (first, False, 128 + first)
    clock[0] += SAME_PRESS_SECONDS
    arrives(signal.SIGTERM)  # changes nothing, ever
    assert not signals.at_once
    signals._take(signal.SIGINT, None)
    assert (signals.first, signals.at_once, signals.exit_code) == (first, True, 130)
    with pytest.raises(Interrupted):
        requests._take(signal.SIGINT, None)


def test_after_a_request_the_former_handlers_come_back() -> None:
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (signals.name, signals.at_once) == ("SIGTERM", False)
    assert {number: signal.getsignal(number) for number in former} == former


LAUNCHING = """
import os, signal
from coremill.world.stop import REQUESTS, StopSignals
REQUESTS.listen()
with StopSignals() as signals:
    signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGINT)  # once more, when the ranks have already ended
print(signals.name)
"""


def test_a_press_that_arrives_again_after_the_ranks_have_ended_does_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Ctrl-C\n", "")
