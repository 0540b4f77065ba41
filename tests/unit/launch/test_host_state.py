"""Hosts that go away: how often they are tried again, and when they are given up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from coremill.errors import InputError
from coremill.launch.reform import LONGEST_PAUSE_SECONDS, HostState, ReformPolicy, check_policy


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
    check_policy(ReformPolicy(min_nodes=2), 2)
    with pytest.raises(InputError, match="fleet.min_nodes is 3, the hostfile has 2"):
        check_policy(ReformPolicy(min_nodes=3), 2)


def test_a_keeper_that_hears_nothing_ends_what_it_keeps() -> None:
    """As behind a cut link: the input neither ends nor says anything."""
    order = {
        "argv": [sys.executable, "-c", "import time; time.sleep(600)"],
        "folder": "/",
        "environ": {},
        "grace_seconds": 5.0,
        "silence_seconds": 1.0,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "coremill.launch.keeper"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as keeper:
        assert keeper.stdin is not None and keeper.stderr is not None
        keeper.stdin.write(json.dumps(order) + "\n")
        keeper.stdin.flush()
        assert keeper.wait(timeout=120) == 128 + signal.SIGTERM
        assert "no word from the first host for 1 s" in keeper.stderr.read()
