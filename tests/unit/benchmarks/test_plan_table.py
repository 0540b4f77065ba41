"""Plans for runs that were recorded on a machine out of reach."""

from __future__ import annotations

from pathlib import Path

from benchmarks.plan_table import GOALS, main, read_recorded

RECORDED = Path(__file__).parents[3] / "benchmarks" / "recorded" / "emerald_rapids.json"


def test_todays_plans_want_no_more_than_an_earlier_version_took() -> None:
    """Layers keep less now, and ranks of one host share memory (docs/plan-table.md): plans may say less, never more."""
    outcomes = read_recorded(RECORDED)
    assert len(outcomes) == 5
    for outcome in outcomes:
        for kind, (percent, _) in GOALS.items():
            assert outcome.errors[kind] <= percent, (outcome.name, kind, outcome.errors)
        assert outcome.errors["memory"] > -30 and outcome.errors["time"] > -30, (outcome.name, outcome.errors)


def test_the_table_is_written(tmp_path: Path) -> None:
    table, numbers = tmp_path / "table.md", tmp_path / "numbers.json"
    assert main(["--recorded", str(RECORDED), "--out", str(table), "--json", str(numbers)]) == 0
    assert "| 322M replicate 1 recomputing |" in table.read_text()
    assert '"memory_planned_bytes"' in numbers.read_text()
