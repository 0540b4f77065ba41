"""What the launcher does about saves that take long: it says so, and a stop waits for those that get on."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.run import rank as rank_module
from coremill.supervise import hang_detector, ranks
from coremill.supervise.hang_detector import HangDetector
from coremill.supervise.stuck import Limits, Stuck, Watch
from coremill.world import heartbeat as heartbeat_module
from coremill.world.heartbeat import HEARTBEAT, Heartbeat, Reading
from coremill.world.stop import StopSignals


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(1e9 * self.now)


@pytest.mark.parametrize(("planned_seconds", "told_after_seconds"), [(0.0, 10), (300.0, 600)])
def test_storage_is_called_slow_by_the_plan_or_where_it_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, planned_seconds: float, told_after_seconds: int
) -> None:
    clock, told, heartbeat = Clock(), [], Heartbeat()
    monkeypatch.setattr(hang_detector, "time", clock)
    board: Any = SimpleNamespace(ranks=1, clear=lambda: None, read=lambda rank: heartbeat.reading())
    watching = HangDetector(board, Limits(), lambda rank, seconds: told.append(round(seconds)), planned_seconds)
    # A heartbeat that an earlier test began sleeps by the real clock: this one would run away with it.
    monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(monotonic_ns=clock.monotonic_ns, sleep=time.sleep))
    with heartbeat.saving(10**9):
        for _ in range(700):
            clock.now += 1.0
            heartbeat.mark()
            heartbeat.saved(1000)
            watching.look([1])
    assert told == [pytest.approx(told_after_seconds, abs=1)]
    with heartbeat.saving(10**9):
        for _ in range(15):
            clock.now += 1.0
            heartbeat.mark()
            watching.look([1])
    assert told[1:] == [pytest.approx(10, abs=2)]


def seconds_to_the_kill(
    monkeypatch: pytest.MonkeyPatch, *, may_grow: bool, writes_seconds: float = 0.0, slower_step_seconds: float = 0.0
) -> float:
    """From a request to stop, where 60 s are given for it."""
    clock, ended = Clock(), []
    began = clock.now
    monkeypatch.setattr(ranks, "time", clock)
    monkeypatch.setattr(ranks, "wait_for_end", lambda pids, seconds: clock.sleep(seconds))
    monkeypatch.setattr(ranks, "end_all", lambda every: ended.append(clock.now - began))
    rank: Any = SimpleNamespace(
        poll=lambda: None, is_running=True, exit_code=None, failed=False, pid=None, ask_to_end=lambda: None
    )

    class Seen:
        look = staticmethod(lambda pids: None)

        @property
        def saved_bytes(self) -> int:
            return int(1000 * min(writes_seconds, clock.now - began))

    seen: Any = Seen()
    seen.slower_step_seconds = slower_step_seconds
    stop = StopSignals()
    stop.first = signal.SIGTERM
    ranks._watch([rank], stop, lambda: None, lambda text: None, lambda code: 0.0, 60.0, seen, may_grow)
    return ended[0]


def test_a_stop_waits_for_a_save_that_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for may_grow, seconds in ((True, 200.0 + ranks.GROWN_GRACE_SECONDS), (False, 60.0)):
        ended = seconds_to_the_kill(monkeypatch, may_grow=may_grow, writes_seconds=200.0)
        assert ended == pytest.approx(seconds, abs=1)


def test_a_stop_waits_for_a_step_that_takes_longer_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    for may_grow, seconds in ((True, 360.0), (False, 60.0)):
        ended = seconds_to_the_kill(monkeypatch, may_grow=may_grow, slower_step_seconds=300.0)
        assert ended == pytest.approx(seconds, abs=1)


def test_a_stop_does_not_wait_for_peers_that_were_lost_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that ranks do together comes to an end: the grace, and rank 0's store, would be held for nothing."""
    clock, stop = Clock(), StopSignals()
    began, stop.first = clock.now, signal.SIGTERM
    monkeypatch.setattr(ranks, "time", clock)
    monkeypatch.setattr(ranks, "wait_for_end", lambda pids, seconds: clock.sleep(seconds))
    rank: Any = SimpleNamespace(
        rank=0, poll=lambda: None, is_running=True, exit_code=None, failed=False, pid=None, stuck=None
    )
    rank.ask_to_end = lambda: None
    rank.only_followed = False

    def end(stuck: Stuck) -> None:
        rank.stuck, rank.exit_code, rank.is_running = stuck, -signal.SIGKILL, False

    rank.is_stuck = end
    monkeypatch.setattr(ranks, "end_all", lambda every: None)
    lost = Stuck(0, "heard nothing", 20.0, by_peers=True)
    seen: Any = SimpleNamespace(look=lambda pids: lost if clock.now - began > 20 else None, saved_bytes=0)
    assert ranks._watch([rank], stop, lambda: None, lambda text: None, lambda code: 0.0, 60.0, seen, False) is None
    assert clock.now - began == pytest.approx(20, abs=1)
    outcome = ranks._outcome([rank], None, stop, (), 0)
    assert outcome.exit_code == 75 and "ranks on other hosts were lost" in outcome.message


def test_how_much_slower_steps_are_is_measured() -> None:
    heartbeat, watch = Heartbeat(), Watch(1, Limits(planned_step_seconds=10.0))
    for second in range(101):
        if second % 25 == 0:
            heartbeat.step_done(1 + second // 25)
        heartbeat.mark()
        watch.look([heartbeat.reading()], [True], float(second), lambda rank: False)
        assert watch.slower_step_seconds == (0.0 if second < 25 else 15.0)


def test_under_a_foreign_launcher_rank_0_shows_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Reading] = []
    screen: Any = SimpleNamespace(take_work=shown.extend)
    monkeypatch.setattr(rank_module, "SHOW_WORK_SECONDS", 0.01)
    with rank_module._showing_own_work(screen), HEARTBEAT.work("exporting", 100):
        HEARTBEAT.advance(60)
        deadline = time.monotonic() + 60
        while not any(each.work_done_bytes == 60 for each in shown) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert ("exporting", 60, 100) in {(each.work, each.work_done_bytes, each.work_total_bytes) for each in shown}
