"""Hosts that go away: how often they are tried again, and when they are given up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.errors import InputError
from coremill.hosts import preflight
from coremill.hosts.across_hosts import outcome_of
from coremill.hosts.agent import AT_ONCE_WORD, SIGINT_AGAIN_SECONDS, STOP_WORD, _wait_for_end
from coremill.hosts.host_restarts import (
    BEAT_SECONDS,
    LONGEST_PAUSE_SECONDS,
    SILENCE_SECONDS,
    HostRestarts,
    HostState,
    check_policy,
)
from coremill.hosts.ssh import ALIVE_COUNT, ALIVE_SECONDS, Host, Remote
from coremill.supervise.output import Failure
from coremill.world.stop import StopSignals

# Measured over ssh between two namespaces: two outages of 8 s, 5.4 s apart, each losing TCP's next try.
LONGEST_STALL_SECONDS = 34.0


def test_pauses_grow_while_a_host_stays_away() -> None:
    state, now, pauses = HostState(started_at=0.0), 100.0, []
    for _ in range(8):
        state.lose(now)
        assert state.start_at is not None
        pauses.append(state.start_at - now)
        now = state.start_at
        state.start(now)
        now += 1.0
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0] and max(pauses) == LONGEST_PAUSE_SECONDS
    assert state.lost_since == 100.0


def test_a_host_that_stayed_has_the_whole_time_again() -> None:
    state = HostState(started_at=0.0)
    state.lose(100.0)
    state.start(101.0)
    state.lose(103.0)
    assert state.lost_since == 100.0
    state.start(105.0)
    state.lose(500.0)
    assert state.lost_since == 500.0 and state.start_at == 501.0


def test_it_is_given_up_only_while_it_is_away() -> None:
    state = HostState(started_at=0.0)
    assert not state.is_given_up(1e9, 60.0)
    state.lose(100.0)
    assert not state.is_given_up(159.0, 60.0) and state.is_given_up(160.0, 60.0)
    state.start(160.0)
    assert not state.is_given_up(1000.0, 60.0)


def test_more_hosts_than_there_are_cannot_be_meant() -> None:
    check_policy(HostRestarts(min_nodes=2), 2)
    with pytest.raises(InputError, match="fleet.min_nodes is 3, the hostfile has 2"):
        check_policy(HostRestarts(min_nodes=3), 2)


KEPT = """
import signal, sys, time
def asked(*_):
    print("asked", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, asked)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("word", "closes", "code", "said", "told"),
    [
        (b"\n" + STOP_WORD + b"\n", True, 75, b"asked\n", b""),
        (b"\n", True, 128 + signal.SIGKILL, b"", b"the connection to the first host is lost"),
        (b"\n", False, 128 + signal.SIGKILL, b"", b"no word from the first host for 6 s"),
    ],
    ids=["asked to stop", "the connection is lost", "a cut link"],
)
def test_only_a_word_is_a_request(word: bytes, closes: bool, code: int, said: bytes, told: bytes) -> None:
    """A rank that hears a request takes all others with it; what is only lost is ended without one."""
    order = {
        "argv": [sys.executable, "-c", KEPT],
        "folder": "/",
        "environ": {},
        "grace_seconds": 60.0,
        "silence_seconds": None if closes else 6.0,
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "coremill.hosts.agent"], stdin=pipe, stdout=pipe, stderr=pipe
    ) as agent:
        assert agent.stdin is not None and agent.stdout is not None and agent.stderr is not None
        agent.stdin.write(json.dumps(order).encode() + b"\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == b"up\n"
        agent.stdin.write(word)
        agent.stdin.flush()
        if closes:
            agent.stdin.close()
        assert agent.wait(timeout=120) == code
        assert agent.stdout.read() == said and told in agent.stderr.read()


def test_a_host_that_is_cut_off_has_ended_its_ranks_before_others_take_their_place() -> None:
    ssh_gives_up_seconds = ALIVE_SECONDS * (ALIVE_COUNT + 1)
    assert LONGEST_STALL_SECONDS < SILENCE_SECONDS < ssh_gives_up_seconds - BEAT_SECONDS


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here")
def test_what_the_user_sets_for_ssh_stays() -> None:
    own = ("ssh", "-F", "/dev/null", "-o", "ServerAliveInterval=77")
    host = Host(name="node1", ranks=1, is_here=False)
    command = Remote(ssh=own, python="python", environ={}).command(host, "coremill.hosts.agent")
    shown = subprocess.run([command[0], "-G", *command[1:]], capture_output=True, text=True, check=True).stdout
    assert "serveraliveinterval 77\n" in shown and f"serveralivecountmax {ALIVE_COUNT}\n" in shown


def test_the_at_once_word_takes_the_grace_back() -> None:
    """A second Ctrl-C on the first host: what has been asked to end and takes its time is ended now."""
    deaf = KEPT.replace("sys.exit(75)", "time.sleep(600)")
    order = {"argv": [sys.executable, "-c", deaf], "folder": "/", "environ": {}, "grace_seconds": 600.0}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "coremill.hosts.agent"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(json.dumps(order).encode() + b"\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == b"up\n"
        agent.stdin.write(STOP_WORD + b"\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == b"asked\n"
        agent.stdin.write(AT_ONCE_WORD + b"\n")
        agent.stdin.flush()
        assert agent.wait(timeout=120) == 128 + signal.SIGINT  # it could have said something before


@pytest.mark.parametrize("words", [[STOP_WORD, AT_ONCE_WORD], [STOP_WORD + b"\n" + AT_ONCE_WORD]])
def test_a_hurry_right_after_the_request_is_not_taken_for_the_same_press(words: list[bytes]) -> None:
    kept = """
import time
from coremill.world.stop import StopSignals
with StopSignals() as stop:
    print("up", flush=True)
    while stop.first is None:
        time.sleep(0.02)
    print("asked", flush=True)
    while not stop.at_once:
        time.sleep(0.02)
raise SystemExit(stop.exit_code)
"""
    order = {"argv": [sys.executable, "-c", kept], "folder": "/", "environ": {}, "grace_seconds": 600.0}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "coremill.hosts.agent"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(json.dumps(order).encode() + b"\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == b"up\n"
        for word in words:
            agent.stdin.write(word + b"\n")
            agent.stdin.flush()
            assert word is not words[0] or agent.stdout.readline() == b"asked\n"
        assert agent.wait(timeout=120) == 130, "it ended by itself, and had the time to say how"


def test_a_launcher_that_hears_both_requests_at_once_has_its_time_to_say_how_it_ended() -> None:
    """It was late to the first, the second came well after that, and the kernel hands both over together."""
    late = """
import os, signal, time
from coremill.world.stop import StopSignals
with StopSignals() as stop:
    print(os.getpid(), flush=True)
    while not stop.at_once:
        time.sleep(0.02)
raise SystemExit(stop.exit_code)
"""
    process = subprocess.Popen([sys.executable, "-c", late], stdout=subprocess.PIPE)
    reader, writer = os.pipe()
    with process, os.fdopen(reader, "rb"), os.fdopen(writer, "wb", buffering=0) as words:
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGSTOP)

        def goes_on() -> None:
            time.sleep(SIGINT_AGAIN_SECONDS + 0.3)
            words.write(AT_ONCE_WORD + b"\n")
            time.sleep(0.4)
            process.send_signal(signal.SIGCONT)

        thread = threading.Thread(target=goes_on)
        thread.start()
        process.terminate()
        _wait_for_end(process, reader, 600.0, False, at_once=False)
        thread.join()
        code = process.poll()
        process.kill()
    assert code == 130


SAVES = """
import os, signal, sys, time
def save(*_):
    if sys.argv[1] == "hangs":
        os.kill(os.getpid(), signal.SIGSTOP)
    until = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < until:
        time.sleep(0.2)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("ends_itself", "does", "save_seconds", "grace_seconds", "code"),
    [
        (True, "saves", 14.0, 10.0, 75),
        (False, "saves", 600.0, 2.5, 128 + signal.SIGKILL),
        (True, "hangs", 600.0, 2.5, 128 + signal.SIGKILL),
    ],
)
def test_a_launcher_that_waits_for_a_save_is_not_killed(
    ends_itself: bool, does: str, save_seconds: float, grace_seconds: float, code: int
) -> None:
    """It ends its ranks itself when no more bytes are written; only where it hangs the host's agent does."""
    order = {
        "argv": [sys.executable, "-c", SAVES, does, str(save_seconds)],
        "folder": "/",
        "environ": {},
        "grace_seconds": grace_seconds,
        "ends_itself": ends_itself,
    }
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "coremill.hosts.agent"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(json.dumps(order).encode() + b"\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == b"up\n"
        agent.stdin.write(STOP_WORD + b"\n")
        agent.stdin.flush()
        assert agent.wait(timeout=120) == code


def test_a_host_that_refuses_decides_how_it_ended() -> None:
    """The others were asked to end, and may have said that they stopped on request."""
    stopped = Failure(rank=1, host="b", exit_code=75, signal=None, time=0.0, follows=False, tail="")

    def run(name: str, code: int, *, asked: bool, failures: list[Failure]) -> Any:
        host, process = Host(name=name, ranks=1, is_here=False), SimpleNamespace(returncode=code)
        return SimpleNamespace(host=host, process=process, was_asked_to_end=asked, failures=failures)

    refuses = run("a", 78, asked=False, failures=[])
    follows = run("b", 75, asked=True, failures=[stopped])
    outcome = outcome_of([refuses, follows], StopSignals())
    assert (outcome.exit_code, outcome.message) == (78, "host a: the command ended with exit code 78")
    assert outcome_of([follows], StopSignals()).exit_code == 75


@pytest.mark.parametrize(
    ("last_line", "words"),
    [
        ("/usr/bin/python3: No module named coremill", "coremill is not installed for"),
        ("/usr/bin/python3: Error while finding ... No module named 'coremill.hosts'", "another version of coremill"),
    ],
)
def test_a_host_with_an_older_coremill_is_told_from_one_without(last_line: str, words: str) -> None:
    remote = Remote(ssh=("ssh",), python="/usr/bin/python3", environ={})
    done = subprocess.CompletedProcess([], 1, "", f"{last_line}\n")
    assert words in preflight._why_no_answer(done, remote)
