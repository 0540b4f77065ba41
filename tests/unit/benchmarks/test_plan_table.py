"""Plans for runs that were recorded on a machine out of reach."""

from __future__ import annotations

from pathlib import Path

from benchmarks.plan_table import GOALS, main, read_recorded

RECORDED = Path(__file__).parents[3] / "benchmarks" / "recorded" / "emerald_rapids.json"


def test_plans_are_near_what_was_measured() -> None:
    outcomes = read_recorded(RECORDED)
    assert len(outcomes) == 5
    for outcome in outcomes:
        for what in ("memory", "wire", "time"):
            assert abs(outcome.errors[what]) <= GOALS[what][0], (outcome.name, outcome.errors)


def test_the_table_is_written(tmp_path: Path) -> None:
    table, numbers = tmp_path / "table.md", tmp_path / "numbers.json"
    assert main(["--recorded", str(RECORDED), "--out", str(table), "--json", str(numbers)]) == 0
    assert "| 375M shard 2 recomputing |" in table.read_text()
    assert '"memory_planned_bytes"' in numbers.read_text()
