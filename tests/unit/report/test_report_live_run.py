"""A run that is followed amounts to what its report says, however little of it is held."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from coremill.errors import InputError
from coremill.report import tally
from coremill.report.events import event_file
from coremill.report.history import SERIES_POINTS, PastSteps
from coremill.report.page import live_run, server
from coremill.report.page.live_run import LiveRun
from coremill.report.records import StepRecord
from coremill.report.summary import summarise
from unit.report.fake_run import START, fake_plan, make_fake_run, write_line

# Sums in another order: equal but for the last bits.
INEXACT = ("tokens_per_second", "goodput", "padding_fraction", "model_flops_per_second", "utilization")


def assert_same(live: dict[str, Any], whole: dict[str, Any]) -> None:
    for name in INEXACT:
        assert live[name] == pytest.approx(whole[name], rel=1e-9), name
    for name in ("steps", "tokens", "loss_first", "loss_last", "state", "evaluations", "marks", "skipped_steps"):
        assert live[name] == whole[name], name
    assert live["loss_spikes"] == whole["loss_spikes"]
    assert live["wall_seconds_split"] == pytest.approx(whole["wall_seconds_split"], abs=1e-6)


def test_a_live_run_holds_little_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "KEPT_STEPS", 20)
    monkeypatch.setattr(tally, "REMEMBERED_AT_ONCE", 5)
    monkeypatch.setattr(live_run, "READ_BYTES", 4096)
    make_fake_run(tmp_path, world_size=2, steps=200)
    run = LiveRun(tmp_path)
    assert run.look() and not run.look()
    live, whole = run.summary(), summarise(tmp_path)
    assert_same(live, whole)
    assert 20 <= len(run.tally.steps) <= 25
    assert live["series"]["step"][0] == 1 and live["series"]["step"][-1] == 200
    assert live["series"]["tokens"][-1] == whole["series"]["tokens"][-1]


def test_only_what_was_appended_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake_run(tmp_path, world_size=1, steps=5, ending="running")
    run = LiveRun(tmp_path)
    run.look()
    monkeypatch.setattr(run.tally, "add", lambda event: heard.append(event.kind))
    heard: list[str] = []
    with event_file(tmp_path, 0).open("a") as file:
        file.write('{"kind":"step","time":1760000900.0,"rank":0,"st')  # half a line
    assert not run.look()
    with event_file(tmp_path, 0).open("a") as file:
        file.write('ep":6,"loss":1.0,"seconds":1.0,"tokens":10}\n')
    assert run.look() and heard == ["step"]


def test_a_run_begun_anew_is_another_one(tmp_path: Path) -> None:
    make_fake_run(tmp_path, world_size=1, steps=30, ending="running")
    run = LiveRun(tmp_path)
    run.look()
    assert run.summary()["steps"] == 30
    shutil.rmtree(tmp_path / "events")
    make_fake_run(tmp_path, world_size=1, steps=3, ending="running")
    assert run.look() and run.summary()["steps"] == 3
    (tmp_path / "plan.json").write_text(json.dumps(fake_plan(1, steps=77).to_json()))
    assert run.look() and run.summary()["steps_planned"] == 77


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        LiveRun(tmp_path)


def test_the_past_of_a_long_run_does_not_grow(tmp_path: Path) -> None:
    past = PastSteps()
    for step in range(1, 100_001):
        past.take(step, StepRecord(0, float(step), 2.0, 1e-3, 1.0, 10.0, 0.0, 0.5, step == 1))
    points = past.curve()
    assert SERIES_POINTS <= len(points) <= 2 * SERIES_POINTS + 1
    assert (points[0].step, points[-1].step) == (1, 100_000)
    assert sum(point.tokens for point in points) == past.tokens == 1_000_000
    assert all(point.loss == 2.0 and point.tokens_per_second == 20.0 for point in points)
    assert (past.steady_count, past.seconds) == (99_999, 50_000.0)


def test_visitors_get_what_changed_since_they_looked(tmp_path: Path) -> None:
    make_fake_run(tmp_path, world_size=1, steps=3, ending="running")
    changes = server.Changes(LiveRun(tmp_path))
    changes.look(at_once=True)
    first, everything, _ = changes.since("", seconds=0)
    assert {"title", "heading", "tiles", "curves", "results"} <= set(everything)
    assert changes.since(first, seconds=0) == (first, {}, False)
    write_line(tmp_path, 0, "step", START + 100, step=4, loss=1.0, seconds=1.0, tokens=10)
    changes.look(at_once=True)
    second, parts, _ = changes.since(first, seconds=0)
    assert second != first and "curves" in parts and "results" not in parts
    assert changes.since("another-server-7", seconds=0)[1].keys() == everything.keys()
    changes.end()
    assert changes.has_ended and changes.since(second, seconds=60) == (second, {}, True)


def test_a_run_that_ends_while_a_visitor_is_written_to_still_shows_him_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fake_run(tmp_path, world_size=1, steps=3, ending="running")
    page_server = server.PageServer(server.listen(0), tmp_path)
    changes, since = page_server.changes, page_server.changes.since

    def end_meanwhile(seen: str, *, seconds: float) -> tuple[str, dict[str, str], bool]:
        news = since(seen, seconds=seconds)
        if news[1] and not changes.has_ended:
            write_line(tmp_path, 0, "end", START + 100, seconds=100.0)
            changes.end()
        return news

    monkeypatch.setattr(changes, "since", end_meanwhile)
    with page_server:
        threading.Thread(target=page_server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection(*page_server.server_address[:2], timeout=60)
        connection.request("GET", "/events")
        said = connection.getresponse().read().decode()
        page_server.shutdown()
    *_, before, last, end = said.strip().split("\n\n")
    assert "running" in before and "finished" in last and end.startswith("event: end")
