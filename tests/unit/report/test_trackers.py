"""Trackers beside a run: what they get, and that whatever one does, nobody waits for it and nothing is left of it."""

from __future__ import annotations

import atexit
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coremill.errors import CoremillError, InputError, PeerLost, Stopped
from coremill.report.events import Event, read_events
from coremill.report.readers.base import Readers
from coremill.report.readers.trackers import TRACKERS, require_libraries
from coremill.report.readers.trackers.numbers import NOTE_CHARACTERS, NumbersOfRun
from coremill.report.readers.trackers.reader import TrackersReader
from coremill.run.folder import RunFolder
from unit.report.fake_run import START, fake_plan, make_fake_run, write_line

STEPS = 52  # with an evaluation after 50
FINISHED = {"state": "finished", "exit_code": 0}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    # Whether somebody waits long enough to be told so depends on how busy the machine is.
    monkeypatch.setattr("coremill.report.readers.trackers.reader.SAY_WAITING_SECONDS", float("inf"))
    return make_fake_run(tmp_path / "run", steps=STEPS, total_steps=STEPS)


class Screen:
    """Follows a run that is already there with some fake trackers, and keeps what was said."""

    def __init__(self, run: Path, *trackers: str, seconds: float = 60.0) -> None:
        self.run, self._text = run, io.StringIO()
        console = Console(file=self._text, force_terminal=False)
        fakes = {name.lower(): f"unit.report.fake_trackers:{name}" for name in trackers}
        self.reader = TrackersReader(run, fakes, console, finished_seconds=seconds)

    def follow(self, summary: dict[str, Any] = FINISHED, until: Callable[[], bool] = lambda: True) -> Screen:
        """The whole run; `until`: what has to have happened before it ends."""
        self.reader.begin()
        self.reader.take(read_events(self.run))
        while not until():
            self.reader.take([])
            time.sleep(0.02)
        self.reader.end(summary)
        return self

    @property
    def said(self) -> str:
        return self._text.getvalue()


def told(run: Path, tracker: str) -> list[Any]:
    try:
        lines = (run / "trackers" / tracker / "told.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def logged(run: Path, tracker: str, name: str) -> list[tuple[int, float]]:
    return [(step, numbers[name]) for kind, step, numbers in told(run, tracker) if kind == "log" and name in numbers]


def of_events(run: Path, kind: str, name: str) -> list[tuple[int, float]]:
    return [(e.get("step"), e.get(name)) for e in read_events(run) if e.kind == kind and e.rank == 0]


def test_a_tracker_gets_every_number_once_and_is_closed(run: Path) -> None:
    write_line(run, 2, "fault", START + 1e6, text="rank 2 was killed", step=52, action="restart")
    screen = Screen(run, "Good").follow()
    for name, field in {"loss": "loss", "learning_rate": "learning_rate", "grad_norm": "gradient_norm"}.items():
        assert logged(run, "good", f"train/{name}") == of_events(run, "step", field)
    assert logged(run, "good", "eval/perplexity") == of_events(run, "evaluation", "perplexity")
    assert len(logged(run, "good", "eval/loss")) == 1
    rates = logged(run, "good", "train/tokens_per_second")
    assert [step for step, _ in rates] == list(range(2, STEPS + 1))  # the first allocates
    seconds = dict(of_events(run, "step", "seconds"))
    assert all(rate == pytest.approx(8176 / seconds[step]) for step, rate in rates)
    plan = fake_plan().to_json()
    ratio = plan["model_flops_per_token"] / plan["matmul_flops_per_second"]
    used = logged(run, "good", "train/utilization")
    assert [step for step, _ in used] == [step for step, _ in rates]
    assert all(share == pytest.approx(rate * ratio) for (_, share), (_, rate) in zip(used, rates, strict=True))
    assert min(value for _, value in logged(run, "good", "train/memory_bytes_per_rank")) > 1e8
    assert told(run, "good")[0] == ["open", None, "run"]
    assert told(run, "good")[-1] == ["close", "finished", 0]
    notes = [lines for kind, _, lines in told(run, "good") if kind == "note"]
    assert notes[-1] == [f"exported to {run}/export", "after step 52: rank 2 was killed (restart)"]
    assert screen.said == f"good: {run}/trackers/good; to look: cat {run}/trackers/good/told.jsonl\n"


def test_a_continuation_goes_on_and_repeated_steps_appear_once(run: Path) -> None:
    Screen(run, "Good", "Rewinding").follow()
    for step in range(50, 56):  # from a checkpoint of step 49
        write_line(run, 0, "step", START + 1e6 + step, step=step, loss=1.0 / step, tokens=10, seconds=1.0)
        if step == 50:
            write_line(run, 0, "evaluation", START + 1e6 + 50.5, step=step, loss=0.5, perplexity=1.6)
    Screen(run, "Good", "Rewinding").follow()
    first = of_events(run, "step", "loss")
    assert logged(run, "good", "train/loss") == [*first[:52], *((step, 1.0 / step) for step in (53, 54, 55))]
    assert len(logged(run, "good", "eval/loss")) == 1
    assert [words for kind, words, _ in told(run, "good") if kind == "open"] == [None, "id-1"]
    # One that can forget is told what no longer holds, before it gets the new numbers.
    story = [(kind, step) for kind, step, _ in told(run, "rewinding") if kind in ("log", "forget")]
    again = [("log", 50), ("log", 50), *(("log", step) for step in range(51, 56))]
    assert story[-9:] == [("forget", 52), ("forget", 49), *again]


def test_what_a_stopped_run_did_not_send_is_sent_by_its_continuation(run: Path) -> None:
    slow = Screen(run, "Slow", seconds=1.5)
    slow.follow(until=lambda: len(told(run, "slow")) > 2)
    assert "did not get there; all numbers are in" in slow.said
    path = run / "trackers" / "slow.json"
    assert json.loads(path.read_text())["done"] == {}  # no batch was whole
    (run / "trackers" / "slow").rename(run / "trackers" / "good")
    path.rename(run / "trackers" / "good.json")
    (run / "trackers" / "good" / "told.jsonl").unlink()
    Screen(run, "Good").follow()
    assert logged(run, "good", "train/loss") == of_events(run, "step", "loss")


def test_a_tracker_that_was_away_gets_what_was_done_meanwhile(run: Path) -> None:
    Screen(run, "FailsWhileTheRunGoesOn").follow(until=lambda: len(of_events(run, "step", "loss")) > STEPS)
    losses = of_events(run, "step", "loss")
    assert losses[-1] == (STEPS + 1, 0.5)  # said while it was away
    assert logged(run, "failswhiletherungoeson", "train/loss") == losses
    assert told(run, "failswhiletherungoeson")[-1] == ["close", "finished", 0]


def test_a_tracker_that_is_away_for_a_moment_gets_everything_and_no_secret_is_said(run: Path) -> None:
    screen = Screen(run, "FailsAtFirst")
    screen.follow(until=lambda: len(logged(run, "failsatfirst", "train/loss")) == STEPS)
    assert screen.said.count("failsatfirst failed, the run goes on: ConnectionError: the server is away") == 1
    assert "hf_" not in screen.said
    assert logged(run, "failsatfirst", "train/loss") == of_events(run, "step", "loss")


def test_trackers_that_raise_hang_or_die_are_ended_said_once_and_leave_nothing(run: Path) -> None:
    def all_have_failed() -> bool:
        told_of_hang = [words for words in told(run, "hangs") if words[0] == "helper"]
        has_all = any(one.name == "good" and one.delivered_step == STEPS for one in screen.reader._processes)
        return bool(told_of_hang) and has_all and "raises failed" in screen.said and "dies has ended" in screen.said

    screen = Screen(run, "Raises", "Hangs", "Dies", "Good", seconds=1.0)
    screen.follow(until=all_have_failed)  # `Hangs` never returns: whoever waited for it would stay here
    assert screen.said.count("raises failed, the run goes on: ValueError: no\n") == 1
    assert screen.said.count(f"dies has ended, see {run}/logs/tracker-dies.log; the run goes on without it\n") == 1
    missing = f"52 steps up to 52 did not get there; all numbers are in {run}/events"
    assert f"hangs was not done after 1 s and was ended: {missing}" in screen.said
    assert screen.said.count(missing) == 3
    assert logged(run, "good", "train/loss") == of_events(run, "step", "loss")
    for pid in next(words[1:] for words in told(run, "hangs") if words[0] == "helper"):
        assert wait_until_gone(pid)


def test_a_run_that_was_ended_at_once_does_not_wait_for_trackers(run: Path) -> None:
    screen = Screen(run, "Hangs", seconds=1e6)
    screen.follow({"state": "stopped", "exit_code": 130}, until=lambda: len(told(run, "hangs")) > 1)
    assert "hangs was not done after 2 s and was ended" in screen.said


def test_a_killed_launcher_takes_its_trackers_along(run: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from rich.console import Console\n"
        "from coremill.report.readers.trackers.reader import TrackersReader\n"
        "reader = TrackersReader(Path(sys.argv[1]), {'hangs': 'unit.report.fake_trackers:Hangs'}, Console())\n"
        "reader.begin()\n"
        "time.sleep(1000)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program, str(run)])
    try:
        while len(told(run, "hangs")) < 2:
            assert launcher.poll() is None
            time.sleep(0.05)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    _, helper, tracker = told(run, "hangs")[1]
    os.kill(helper, signal.SIGKILL)  # of a library that leaves processes behind; W&B's own ends with its parent
    assert wait_until_gone(tracker)


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_library_that_is_missing_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()  # as W&B leaves one where somebody works
    monkeypatch.syspath_prepend(tmp_path)
    finder = "coremill.report.readers.trackers.importlib.util.find_spec"
    with monkeypatch.context() as patch:
        from importlib.machinery import PathFinder

        patch.setattr(finder, lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
        for name in TRACKERS:
            with pytest.raises(InputError) as refused:
                require_libraries([name])
            assert refused.value.where == "run.trackers"
            assert f"pip install 'coremill[{name}]'" in str(refused.value)
    require_libraries([])


def test_a_step_done_again_has_its_own_rate() -> None:
    """After a restart from step 5 of 10, ten times slower: not the rate of the furthest step."""
    numbers = NumbersOfRun.of_plan({"world_size": 1})

    def rates(attempt: float, steps: range, seconds: float) -> list[float | None]:
        numbers.take(Event("start", attempt, 0, {"world_size": 1, "attempt": attempt}))
        told = (
            numbers.take(
                Event("step", attempt + step, 0, {"step": step, "loss": 1.0, "seconds": seconds, "tokens": 100})
            )
            for step in steps
        )
        return [point.numbers.get("train/tokens_per_second") for point in told if point is not None]

    assert rates(0.0, range(1, 11), 1.0) == [None, *[100.0] * 9]
    assert rates(100.0, range(6, 9), 10.0) == [None, 10.0, 10.0]


def test_notes_stay_short_however_long_the_run() -> None:
    numbers = NumbersOfRun.of_plan({})
    for step in range(1000):
        numbers.take(Event("save", float(step), 0, {"step": step, "saved": True}))
    assert numbers.notes[-1] == "step 999 saved"
    assert NOTE_CHARACTERS - 20 < sum(map(len, numbers.notes)) <= NOTE_CHARACTERS


def test_a_fresh_run_forgets_what_trackers_know_and_a_continuation_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "trackers" / "wandb.json"
    file.parent.mkdir()
    file.write_text("{}")
    RunFolder(tmp_path).clear(keep_events=True)
    assert file.exists()
    RunFolder(tmp_path).clear()
    assert not file.exists()


@pytest.mark.parametrize(("error", "state"), [(PeerLost("gone"), "failed"), (Stopped("asked"), "stopped")])
def test_a_run_that_breaks_off_leaves_no_tracker(
    run: Path, monkeypatch: pytest.MonkeyPatch, error: CoremillError, state: str
) -> None:
    monkeypatch.setattr("coremill.report.readers.trackers.reader.AT_ONCE_SECONDS", 60.0)  # it ends sooner by itself
    hooks: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda hook, *_: hooks.append(hook))
    monkeypatch.setattr(atexit, "unregister", hooks.remove)
    screen = Screen(run, "Good")
    readers = Readers(run, [screen.reader])
    with pytest.raises(type(error)), readers.closed_after(), readers:
        while not told(run, "good"):
            readers.take([])
            time.sleep(0.02)
        raise error
    (one,) = screen.reader._processes
    assert one.process.returncode is not None
    assert told(run, "good")[-1] == ["close", state, error.exit_code]
    assert hooks == []
