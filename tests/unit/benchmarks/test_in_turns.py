"""Who takes turns is measured by its own time only."""

from __future__ import annotations

import pytest
from benchmarks.in_turns import active_seconds, steps_done

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
