"""Ranks find each other although some are lost and replaced while they wait; without torch, ranks are threads."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from coremill.errors import CoremillError, PeerLost, Stopped
from coremill.world import meeting
from coremill.world.identity import RankIdentity
from coremill.world.stop import StopRequests


class Store:
    """What a TCPStore does, in this process."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount
            return int(self._values[key])

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> str:
        return str(self._values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError(f"wait timeout, keys: {keys}")


def identity(rank: int, size: int = 3) -> RankIdentity:
    return RankIdentity(
        rank=rank,
        size=size,
        local_rank=0,
        local_size=1,
        node_rank=rank,
        master_address="node0",
        master_port=29500,
        launcher="coremill",
    )


class Rank(threading.Thread):
    """One rank at the meeting."""

    def __init__(self, store: Store, rank: int, within_seconds: float = 20.0) -> None:
        super().__init__(daemon=True)
        self.outcome: Any = None
        self._arguments = (store, identity(rank), time.monotonic() + within_seconds)
        self.start()

    def run(self) -> None:
        try:
            self.outcome = meeting.call_the_roll(*self._arguments)  # type: ignore[arg-type]
        except CoremillError as error:
            self.outcome = error

    def result(self) -> Any:
        self.join(30)
        return self.outcome


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "FRESH_SECONDS", 1.0)
    monkeypatch.setattr(meeting, "ABANDONED_SECONDS", 1.5)


def lost_rank(store: Store, rank: int) -> None:
    """Came to the meeting, and was killed there."""
    store.add(f"claims/{rank}", 1)
    store.add(f"beats/{rank}", 7)
    store.set(f"entries/{rank}", json.dumps({"size": 3, "host": "gone", "time": 0.0}))


def test_all_meet() -> None:
    store = Store()
    outcomes = [rank.result() for rank in [Rank(store, number) for number in range(3)]]
    assert all(len(entries) == 3 for entries in outcomes) and outcomes[0] == outcomes[2]


def test_a_rank_that_was_lost_at_the_meeting_is_waited_for_and_replaced() -> None:
    store = Store()
    lost_rank(store, 1)
    ranks = [Rank(store, 0), Rank(store, 2)]
    time.sleep(0.5)
    assert all(rank.is_alive() for rank in ranks)  # not counted as there
    ranks.append(Rank(store, 1))
    for entries in [rank.result() for rank in ranks]:
        assert isinstance(entries, list) and [entry["host"] == "gone" for entry in entries] == [False] * 3


def test_a_rank_that_nobody_replaces_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "FRESH_SECONDS", 60.0)  # of those who are there nobody is slow to say so
    store = Store()
    lost_rank(store, 1)
    outcomes = [rank.result() for rank in (Rank(store, 0, 3.0), Rank(store, 2, 3.0))]
    assert all("1 of 3 ranks did not arrive in time: 1" in str(outcome) for outcome in outcomes)


def test_a_rank_that_is_there_is_not_replaced() -> None:
    store = Store()
    first = Rank(store, 1)
    time.sleep(0.3)
    second = Rank(store, 1)
    assert isinstance(second.result(), meeting.ClaimedTwice) and first.is_alive()
    others = [Rank(store, 0), Rank(store, 2)]
    assert all(isinstance(rank.result(), list) for rank in (first, *others))
    assert isinstance(Rank(store, 1).result(), meeting.ClaimedTwice)  # the roll is over


def test_a_request_waits_until_ranks_are_connected() -> None:
    requests = StopRequests()
    with requests.held_back():
        pass
    with pytest.raises(Stopped), requests.held_back():
        requests.reason = "SIGTERM"
    requests = StopRequests()
    requests.between_steps()
    with requests.held_back():
        requests.reason = "SIGTERM"  # noted, as before


@pytest.mark.parametrize(("lives", "expected"), [(True, meeting.ClaimedTwice), (False, PeerLost)])
def test_a_successor_waits_until_the_store_of_the_attempt_before_is_gone(
    monkeypatch: pytest.MonkeyPatch, lives: bool, expected: type[CoremillError]
) -> None:
    """78 would end the job for good; only where its predecessor lives, two were started."""
    now, asked = [0.0], []

    def refuse(*_: Any) -> Any:
        asked.append(now[0])
        error = meeting.ClaimedTwice("two processes say they are rank 1")
        error.beats = len(asked) if lives else 7
        raise error

    class Clock:
        monotonic = staticmethod(lambda: now[0])

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds

    monkeypatch.setattr(meeting, "time", Clock)
    monkeypatch.setattr(meeting, "open_store", lambda *_: None)
    monkeypatch.setattr(meeting, "call_the_roll", refuse)
    with pytest.raises(expected):
        meeting.meet_at_a_fresh_store(identity(1), 900.0)
    assert now[0] == pytest.approx(meeting.OLD_STORE_SECONDS if lives else 900.0, abs=1)
