"""Who is stuck: what ranks say and when, in; the rank to end, out. No clock and no process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coremill.supervise.hang_detector import Starvation
from coremill.supervise.stuck import Limits, Stuck, Watch
from coremill.world.heartbeat import SLOT_WORDS, Heartbeat, HeartbeatBoard, Reading

TICK = 0.25


class Ranks:
    """Ranks that do what a test says, looked at four times a second."""

    def __init__(self, count: int = 2, limits: Limits | None = None) -> None:
        self.words = [
            {"beats": 1, "marks": 1, "phase": "step", "step": 1, "steps_done": 0, "is_waiting": False}
            for _ in range(count)
        ]
        self.saving: list[float | None] = [None] * count
        self.saved_bytes = [0] * count
        self.running = [True] * count
        self.stopped: set[int] = set()
        self.watch = Watch(count, limits or Limits())
        self.now = 1000.0

    def pass_by(self, seconds: float, each_tick: Callable[[int], None] = lambda tick: None) -> Stuck | None:
        for tick in range(round(seconds / TICK)):
            for index, words in enumerate(self.words):
                if index not in self.stopped:
                    words["beats"] += 1
            each_tick(tick)
            self.now += TICK
            readings = [
                Reading(first_step=1, saving_since=since, saved_bytes=saved, **words)  # type: ignore[arg-type]
                for words, since, saved in zip(self.words, self.saving, self.saved_bytes, strict=True)
            ]
            found = self.watch.look(readings, self.running, self.now, lambda index: index in self.stopped)
            if found is not None:
                return found
        return None

    def train(self, steps: int, step_seconds: float = 1.0) -> None:
        """All ranks do steps of this length, and are left waiting for each other's next word."""

        def work(tick: int) -> None:
            if (tick + 1) * TICK % step_seconds == 0:
                for words in self.words:
                    words["marks"] += 3
                    words["steps_done"] += 1
                    words["step"] += 1

        assert self.pass_by(steps * step_seconds, work) is None

    def wait(self, *ranks: int) -> None:
        for rank in ranks:
            self.words[rank]["is_waiting"] = True
            self.words[rank]["marks"] += 1


def test_a_stopped_rank_is_named_after_ten_seconds_and_not_earlier() -> None:
    ranks = Ranks(3)
    ranks.train(steps=5)
    ranks.stopped = {1}
    ranks.wait(0, 2)
    assert ranks.pass_by(9.0) is None
    found = ranks.pass_by(2.0)
    assert found is not None and found.local_rank == 1
    assert found.text == "is stopped (no sign of life for 10 s in step 6)"


def test_a_stall_that_heals_in_time_is_none() -> None:
    ranks = Ranks()
    ranks.train(steps=5)
    for _ in range(3):
        ranks.stopped = {1}
        ranks.wait(0)
        assert ranks.pass_by(8.0) is None
        ranks.stopped = set()
        ranks.words[0]["is_waiting"] = False
        ranks.train(steps=1)


def test_long_steps_get_five_times_their_median() -> None:
    ranks = Ranks()
    ranks.train(steps=5, step_seconds=6.0)
    ranks.stopped = {0}
    assert ranks.watch.limit_seconds == pytest.approx(30.0)
    assert ranks.pass_by(29.0) is None
    found = ranks.pass_by(2.0)
    assert found is not None and found.local_rank == 0


def test_a_stopped_rank_is_noticed_in_every_phase() -> None:
    ranks = Ranks()
    for words in ranks.words:
        words["phase"] = "load"
    ranks.stopped = {1}
    found = ranks.pass_by(11.0)
    assert found is not None and found.local_rank == 1 and "in phase load" in found.text


def test_the_rank_that_spins_is_told_from_those_that_wait_for_it() -> None:
    ranks = Ranks(4)
    ranks.train(steps=5)
    ranks.wait(0, 1, 3)  # rank 2 beats, but does not get on
    found = ranks.pass_by(11.0)
    assert found is not None and found.local_rank == 2
    assert found.text == "has not got on for 10 s in step 6, and the others wait for it"


@pytest.mark.parametrize("phase", ["start", "build", "load", "evaluate", "save", "export", "finish", "other"])
def test_phases_without_steps_take_their_time(phase: str) -> None:
    ranks = Ranks()
    ranks.train(steps=5)
    for words in ranks.words:
        words["phase"] = phase
    ranks.wait(1)
    assert ranks.pass_by(500.0) is None
    found = ranks.pass_by(200.0)
    assert found is not None and found.local_rank == 0


def test_the_first_steps_take_their_time() -> None:
    ranks = Ranks()
    assert ranks.pass_by(100.0) is None
    assert ranks.pass_by(30.0) is not None


def test_the_plan_knows_of_long_first_steps() -> None:
    ranks = Ranks(limits=Limits(planned_step_seconds=30.0))
    assert ranks.pass_by(290.0) is None
    assert ranks.pass_by(20.0) is not None


def test_ranks_that_all_wait_are_a_lost_host_or_a_deadlock() -> None:
    here, far = Ranks(), Ranks(limits=Limits(other_hosts=True))
    for ranks in (here, far):
        ranks.train(steps=5)
        ranks.wait(0, 1)
    assert far.pass_by(19.0) is None
    found = far.pass_by(2.0)
    assert found is not None and "heard nothing from the ranks on other hosts for 20 s" in found.text
    assert found.by_peers
    assert here.pass_by(29.0) is None
    found = here.pass_by(2.0)
    assert found is not None and "as they do for it" in found.text


def test_a_suspended_launcher_finds_its_ranks_as_it_left_them() -> None:
    ranks = Ranks()
    ranks.train(steps=5)
    ranks.now += 3600.0
    assert ranks.pass_by(5.0, lambda tick: ranks.words[0].update(marks=100 + tick)) is None


def test_a_rank_without_a_cpu_is_excused() -> None:
    ranks = Ranks()
    ranks.train(steps=5)
    ranks.wait(1)

    def starve(tick: int) -> None:
        if tick % 4 == 3:
            ranks.watch.excuse(0, 1.0)

    assert ranks.pass_by(60.0, starve) is None
    assert 1 in ranks.watch.suspects()
    assert ranks.pass_by(11.0) is not None


def test_a_hung_save_has_a_deadline_of_its_own() -> None:
    ranks = Ranks(limits=Limits(save_deadline_seconds=60.0))
    ranks.train(steps=5)
    ranks.saving[1] = ranks.now
    ranks.train(steps=59)
    ranks.saving[1] = None
    ranks.train(steps=5)
    ranks.saving[0] = ranks.now

    def work(tick: int) -> None:
        for words in ranks.words:
            words["marks"] += 1

    found = ranks.pass_by(61.0, work)
    assert found is not None and found.local_rank == 0 and found.by_storage


def test_a_save_without_a_deadline_lasts_as_long_as_it_gets_on() -> None:
    ranks = Ranks(limits=Limits(save_deadline_seconds=60.0, save_may_get_on=True))
    ranks.train(steps=5)
    ranks.saving[1] = ranks.now

    def work(tick: int) -> None:
        for words in ranks.words:
            words["marks"] += 1

    def work_and_write(tick: int) -> None:
        work(tick)
        if tick % 100 == 0:
            ranks.saved_bytes[1] += 4096

    assert ranks.pass_by(3600.0, work_and_write) is None
    found = ranks.pass_by(61.0, work)
    assert found is not None and found.local_rank == 1 and found.by_storage
    assert found.text == "has been writing a checkpoint for 60 s without a byte getting on"


@pytest.mark.parametrize("phase", ["load", "export", "other"])
def test_long_work_that_gets_on_is_never_stuck(phase: str) -> None:
    ranks = Ranks()
    for words in ranks.words:
        words["phase"] = phase
    ranks.wait(1)

    def read(tick: int) -> None:
        if tick % 200 == 0:  # a piece in 50 s
            ranks.words[0]["marks"] += 1

    assert ranks.pass_by(3600.0, read) is None
    ranks.stopped = {0}
    found = ranks.pass_by(11.0)
    assert found is not None and found.local_rank == 0 and "is stopped" in found.text


def test_a_save_has_time_to_be_given_up_by_the_ranks_themselves() -> None:
    ranks = Ranks(limits=Limits(save_deadline_seconds=930.0))
    for words in ranks.words:
        words["phase"] = "save"
    assert ranks.pass_by(900.0) is None
    assert ranks.pass_by(60.0) is not None


def test_a_named_time_and_never() -> None:
    named = Ranks(limits=Limits(stuck_after_seconds=3.0))
    found = named.pass_by(4.0)
    assert found is not None
    never = Ranks(limits=Limits(is_watching=False))
    never.stopped = {0, 1}
    assert never.pass_by(100.0) is None


def test_a_rank_that_has_ended_is_not_stuck() -> None:
    ranks = Ranks()
    ranks.train(steps=5)
    ranks.stopped, ranks.running = {1}, [True, False]

    def work(tick: int) -> None:
        ranks.words[0]["marks"] += 1

    assert ranks.pass_by(60.0, work) is None


def test_a_heartbeat_reaches_the_board() -> None:
    heartbeat = Heartbeat()
    heartbeat.enter("meet")  # before anybody listens
    assert not heartbeat.begin({})
    with HeartbeatBoard(2) as board:
        variable = board.variable(1)
        descriptor = os.dup(board.descriptor)  # the rank closes what it inherits
        (name,) = variable
        assert heartbeat.begin({name: f"{descriptor}:1"})
        with pytest.raises(OSError):
            os.fstat(descriptor)
        assert board.read(0).marks == 0 and board.read(1).phase == "meet"
        heartbeat.step(7)
        with heartbeat.waiting(), heartbeat.waiting():
            assert board.read(1).is_waiting
        with heartbeat.phase("evaluate"), heartbeat.saving():
            reading = board.read(1)
            assert (reading.phase, reading.step, reading.first_step) == ("evaluate", 7, 7)
            assert reading.saving_since is not None
        with heartbeat.work("reading weights", 100):
            heartbeat.advance(60)
            with heartbeat.work("making weights", 7), heartbeat.saving(50):
                heartbeat.advance(1)
                heartbeat.saved(20)
                reading = board.read(1)
                assert (reading.work, reading.work_done_bytes, reading.work_total_bytes) == ("making weights", 1, 7)
                assert (reading.saved_bytes, reading.save_total_bytes) == (20, 50)
            reading = board.read(1)
            assert (reading.work, reading.work_done_bytes, reading.work_total_bytes) == ("reading weights", 60, 100)
            assert reading == replace(heartbeat.reading(), beats=reading.beats)
        assert board.read(1).work == ""
        heartbeat.step_done(7)
        reading = board.read(1)
        assert not reading.is_waiting and reading.saving_since is None
        assert (reading.phase, reading.steps_done) == ("step", 7) and reading.beats >= 1
        heartbeat._words = memoryview(bytearray(SLOT_WORDS * 8)).cast("Q")  # the thread lets the board go


def test_a_stranger_in_the_environment_is_no_launcher() -> None:
    for text in ("", "x:1", "99999:0", "0"):
        assert not Heartbeat().begin({"COREMILL_PULSE_FD": text})


def test_starvation_is_that_of_the_hungriest_thread(tmp_path: Path) -> None:
    def kernel_says(**waited: int) -> None:
        for thread, nanoseconds in waited.items():
            folder = tmp_path / "17" / "task" / thread.removeprefix("t")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "schedstat").write_text(f"123 {nanoseconds} 4\n")

    starvation = Starvation(tmp_path)
    kernel_says(t1=10**9, t2=5 * 10**9)
    assert starvation.seconds_since([17]) == {17: 0.0}
    kernel_says(t1=2 * 10**9, t2=5 * 10**9, t3=9 * 10**9)
    assert starvation.seconds_since([17, 18]) == {17: 1.0, 18: 0.0}
