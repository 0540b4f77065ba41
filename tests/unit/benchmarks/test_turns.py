"""Who takes turns is measured by its own time only."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from benchmarks.turns import Contender, active_seconds, steps_done, stolen_seconds

TURNS = [(0.0, 3.0), (6.0, 9.0), (12.0, 15.0)]


def test_only_turns_count() -> None:
    assert active_seconds(TURNS, 2.0, 7.0) == 2.0
    assert active_seconds(TURNS, 3.5, 5.5) == 0.0
    assert active_seconds(TURNS, -1.0, 99.0) == 9.0


def test_a_step_under_way_counts_by_the_share_of_its_turns() -> None:
    ends = [1.0, 7.0, 13.0]  # the second one took 2 s of the first turn and 1 s of the second
    assert steps_done(ends, TURNS, 1.0) == 1.0
    assert steps_done(ends, TURNS, 3.0) == pytest.approx(1 + 2 / 3)
    assert steps_done(ends, TURNS, 5.0) == pytest.approx(1 + 2 / 3)  # it stood still
    assert steps_done(ends, TURNS, 8.0) == pytest.approx(2 + 1 / 3)
    assert steps_done(ends, TURNS, 99.0) == 3.0


def test_steps_that_end_after_the_last_turn_do_not_count(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as leader:
        contender = Contender("one", tmp_path, 1, "mark", leader, turns=list(TURNS), stolen=[0.3, 0.1, 0.2])
    (tmp_path / "events").mkdir()
    # Two steps a turn; asked to end at 20, it did one more in time that was nobody's turn.
    ends = [1.5, 3.0, 7.5, 9.0, 13.5, 14.9, 20.0]
    lines = [json.dumps({"kind": "step", "time": end}) for end in ends]
    (tmp_path / "events" / "rank-00000.jsonl").write_text("\n".join(lines))
    assert contender.steps_by_turn() == [((6.0, 9.0), [2.0])]
    assert contender.tokens_per_second_by_turn(300) == [200.0]
    assert contender.stolen_by_turn() == [0.1]


def test_what_neighbours_took_only_grows() -> None:
    before = stolen_seconds()
    assert len(before) == len(os.sched_getaffinity(0))
    assert all(later >= earlier for earlier, later in zip(before, stolen_seconds(), strict=True))
