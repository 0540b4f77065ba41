"""Wall time leaves out when nobody ran, and a continuation's plan is of what is left."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from coremill.report.pauses import pauses_between
from coremill.report.plan_screen import run_in_words
from coremill.report.summary import summarise
from coremill.report.summary_screen import render_summary
from unit.report.fake_run import START, fake_plan, write_line


def test_gaps_between_attempts_are_pauses_but_for_restarts() -> None:
    assert pauses_between([], []) == []
    assert pauses_between([(0.0, 10.0)], []) == []
    assert pauses_between([(100.0, 120.0), (0.0, 10.0)], []) == [(10.0, 100.0)]
    assert pauses_between([(0.0, 10.0), (30.0, 50.0)], [10.0]) == []  # ranks were started again
    assert pauses_between([(0.0, 10.0), (30.0, 50.0), (100.0, 110.0)], [10.0]) == [(50.0, 100.0)]
    assert pauses_between([(0.0, 60.0), (30.0, 50.0), (100.0, 110.0)], []) == [(60.0, 100.0)]  # clocks of two hosts


def write_attempt(folder: Path, began: float, steps: range, *, stopped: bool) -> None:
    for rank in range(2):
        write_line(folder, rank, "start", began + rank, world_size=2, hostname="here", attempt=began)
        write_line(folder, rank, "data", began + 1, train_rows=10)
        for step in steps:
            at = began + 2 + (step - steps[0])
            write_line(folder, rank, "step", at, step=step, loss=1.0, seconds=1.0, tokens=100)
        if stopped:
            write_line(folder, rank, "error", began + 2 + len(steps), message="stopped", exit_code=75)
        else:
            write_line(folder, rank, "end", began + 2 + len(steps), seconds=9.0)


def test_a_pause_is_no_wall_time(tmp_path: Path) -> None:
    """Stopped after step 4, gone on a day later."""
    (tmp_path / "plan.json").write_text('{"world_size": 2, "steps": 10, "rows_per_step": 2}')
    write_attempt(tmp_path, START, range(1, 5), stopped=True)
    write_attempt(tmp_path, START + 86400, range(5, 11), stopped=False)
    summary = summarise(tmp_path)
    assert summary["state"] == "finished" and summary["steps"] == 10
    assert summary["seconds"] == pytest.approx(6 + 8) and summary["pauses"] == 1
    assert summary["pause_seconds"] == pytest.approx(86400 - 6)
    assert summary["series"]["elapsed_seconds"][-1] == pytest.approx(6 + 7)  # curves over time go on where they were
    assert summary["goodput"] == pytest.approx(10 / 14)
    assert summary["epochs"] == pytest.approx(2.0)
    assert summary["wall_seconds_split"]["other"] == pytest.approx(4.0)


def test_a_pause_before_going_back_is_no_wall_time_either(tmp_path: Path) -> None:
    """`train --from 2`: the launcher's word about it comes before the ranks', and belongs to no attempt."""
    (tmp_path / "plan.json").write_text('{"world_size": 2, "steps": 10}')
    write_attempt(tmp_path, START, range(1, 5), stopped=True)
    write_line(tmp_path, 0, "set_aside", START + 86399, after_step=2)
    write_attempt(tmp_path, START + 86400, range(3, 11), stopped=False)
    summary = summarise(tmp_path)
    assert summary["pauses"] == 1 and summary["seconds"] == pytest.approx(6 + 10)


def test_a_restart_is_wall_time(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"world_size": 2}')
    write_attempt(tmp_path, START, range(1, 5), stopped=False)
    write_line(tmp_path, 1, "fault", START + 7, action="restart", cause="killed", text="rank 1 was killed")
    write_attempt(tmp_path, START + 20, range(3, 7), stopped=False)
    summary = summarise(tmp_path)
    assert summary["pauses"] == 0 and summary["pause_seconds"] == 0 and summary["seconds"] == pytest.approx(26)


def test_a_continuation_plans_what_is_left_and_the_report_compares_all() -> None:
    whole = fake_plan(4, steps=300)
    rest = replace(whole, steps_done=200)
    hours, usd = whole.hours(), whole.usd()
    assert hours is not None and usd is not None
    assert rest.hours() == pytest.approx(hours / 3) and rest.usd() == pytest.approx(usd / 3)
    assert run_in_words(rest, train_rows=1600).startswith("run: 100 of 300 steps left, 3 epochs in all, 7m 25s at the")
    assert run_in_words(whole, train_rows=1600).startswith("run: 300 steps, 3 epochs, 22m 15s at the planned speed, $")


def test_the_plan_in_the_report_is_of_all_steps(tmp_path: Path) -> None:
    rest = replace(fake_plan(4, steps=300), steps_done=200)
    (tmp_path / "plan.json").write_text(json.dumps(rest.to_json()))
    (tmp_path / "events").mkdir()
    planned = summarise(tmp_path)["plan"]
    assert planned["hours"] == pytest.approx(fake_plan(4, steps=300).hours())
    assert planned["usd"] == pytest.approx(fake_plan(4, steps=300).usd())


def test_pauses_and_epochs_are_said_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"world_size": 2, "steps": 10, "rows_per_step": 2}')
    write_attempt(tmp_path, START, range(1, 5), stopped=True)
    write_attempt(tmp_path, START + 100, range(5, 8), stopped=True)
    write_attempt(tmp_path, START + 200, range(8, 11), stopped=False)
    file = io.StringIO()
    render_summary(summarise(tmp_path), Console(file=file))
    assert file.getvalue().splitlines()[:3] == [
        "finished  10 steps in 16.0 s, loss 1.0000 -> 1.0000",
        "trained on 1,000 tokens: 2.00 epochs of 10 rows",
        "2 pauses between a stop and its continuation, 3m 09s together, are not counted",
    ]
