"""From trials to rows, tables and pages."""

from __future__ import annotations

from pathlib import Path

from chaos import table
from chaos.__main__ import _judge
from chaos.catalogue import EXPERIMENTS
from chaos.experiment import COREMILL, Experiment, Row, Trial, quantile


def row_of(key: str, *trials: Trial, system: str = COREMILL) -> Row:
    experiment = Experiment(
        key=key, fault=f"fault {key}", promise="", short_trials=1, long_trials=1, seconds_per_trial=1, system=system
    )
    return Row.of(experiment, trials, seconds=1.0, machine="a machine")


def good(**changes: object) -> Trial:
    return Trial(**{"passed": True, "fault": "f", "outcome": "went on", **changes})  # type: ignore[arg-type]


def test_a_quantile_is_a_value_that_occurred():
    values = [float(value) for value in range(1, 51)]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile([7.0], 0.95)) == (25.0, 48.0, 7.0)


def test_a_row_says_what_its_trials_saw():
    trials = [good(detected_seconds=0.1 * n, resumed_seconds=6 + n, steps_lost=n % 4) for n in range(20)]
    row = row_of("X1", *trials, good(exit_code=75), Trial(passed=False, fault="f", outcome="hung"))
    cells = table.cells(row)
    assert cells[2:7] == ["22", "21 of 22", "0.9 s, p95 1.8", "15.0 s, p95 24.0", "0 to 3"]
    assert cells[7:] == ["", "75"] and not row.is_good
    assert row.failures[0]["outcome"] == "hung"
    assert row.outcomes == {"went on": 21, "hung": 1}


def test_a_run_that_differs_in_the_end_fails_every_fault_it_bore():
    found = {"X1": [good(), good()], "X4": [good()]}
    _judge(found, "step 7: losses differ")
    assert [trial.passed for trials in found.values() for trial in trials] == [False] * 3
    assert "losses differ" in found["X4"][0].outcome and found["X4"][0].same_bits is False
    found = {"X7": [good(is_compared=False)]}
    _judge(found, "step 7: losses differ")
    assert found["X7"] == [good(is_compared=False)]
    found = {"X1": [good(), Trial(passed=False, fault="f", outcome="hung")]}
    _judge(found, None)
    assert [(trial.passed, trial.same_bits) for trial in found["X1"]] == [(True, True), (False, True)]


def test_the_file_grows_and_a_row_replaces_its_own_only(tmp_path: Path):
    path = tmp_path / "rows.json"
    table.merge(path, [row_of("X10", good()), row_of("X2", good(), good())])
    table.merge(path, [row_of("X2", good(steps_lost=3)), row_of("X2", good(), system="a peer")])
    rows = table.read(path)
    assert [(row.key, row.system, row.trials) for row in rows] == [
        ("X2", COREMILL, 1), ("X2", "a peer", 1), ("X10", COREMILL, 1),
    ]  # fmt: skip
    assert rows[0].steps_lost == (3,)


def test_the_page_is_written_between_its_marks(tmp_path: Path):
    page = tmp_path / "chaos.md"
    page.write_text(f"# Before\n\n{table.BEGIN}\nold\n{table.END}\n\nafter\n")
    rows = [row_of("X1", good()), row_of("X1", Trial(passed=False, fault="f", outcome="exit 1"), system="a peer")]
    for _ in range(2):
        table.write_markdown(page, rows)
    text = page.read_text()
    assert text.startswith("# Before\n") and text.endswith("\n\nafter\n") and "old" not in text
    assert "| X1 | fault X1 | 1 | 1 of 1 |" in text
    assert "| X1 | fault X1 | went on (1 of 1) | exit 1 (1 of 1) |" in text


def test_names_are_unique_and_the_short_form_is_short():
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(set(names)) == len(names)
    assert sum(each.expected_seconds(each.short_trials) for each in EXPERIMENTS if each.short_trials) <= 240
