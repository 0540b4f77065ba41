"""A run of so many epochs, in steps, hours and dollars."""

from dataclasses import replace

import pytest

from coremill.config.schema import CheckpointSection, RunConfig
from coremill.hardware.facts import Fleet
from coremill.hardware.instances import fleet_of
from coremill.plan.card import read_card
from coremill.plan.compare import compare_fleets
from coremill.plan.known_length import with_steps
from coremill.plan.planner import make_plan
from coremill.plan.types import RowCount
from coremill.report.plan_screen import length_in_words
from unit.plan.shapes import LLAMA_3_8B, LLAMA_50M, fleet

SMALL = read_card(config=LLAMA_50M, name="small")
ROWS = RowCount(rows=1000, row_tokens=64, is_estimate=True, words="a guess")


def config(**train: object) -> RunConfig:
    return RunConfig.model_validate({"data": {"sequence_length": 64}, "train": {"tokens_per_step": 512, **train}})


def test_epochs_give_steps_hours_and_dollars() -> None:
    plan = make_plan(config(epochs=2), fleet_of("c7i.8xlarge"), SMALL, rows=ROWS)
    assert plan.steps == 250 and plan.steps_estimated
    assert plan.hours() == pytest.approx(250 * plan.step_seconds.total / 3600)
    usd, hourly = plan.usd(), plan.usd_per_hour
    assert usd is not None and hourly is not None and usd == pytest.approx(hourly * (plan.hours() or 0))
    words = length_in_words(plan.to_json())
    assert words == "number of steps, estimated: 2 epochs of about 1,000 rows, 8 a step: a guess"


def test_what_is_set_is_no_estimate_and_what_is_unknown_is_said() -> None:
    plan = make_plan(config(steps=7), fleet(), SMALL, rows=ROWS)
    assert plan.steps == 7 and not plan.steps_estimated and length_in_words(plan.to_json()) == ""
    unknown = RowCount(rows=None, row_tokens=64, is_estimate=True, words="not known: no such file")
    plan = make_plan(config(epochs=1), fleet(), SMALL, rows=unknown)
    assert plan.steps is None and plan.hours() is None
    assert length_in_words(plan.to_json()) == "number of steps: not known: no such file"


def test_a_comparison_and_remedies_have_prices_too() -> None:
    fleets = [fleet_of("2xc7i.4xlarge"), fleet_of("c7i.8xlarge")]
    plans = compare_fleets(config(epochs=1), fleets, SMALL, rows=ROWS).by_cost
    assert [plan.steps for plan in plans] == [125, 125] and all(plan.usd() for plan in plans)
    large = read_card(config=LLAMA_3_8B, name="large")
    plan = make_plan(config(epochs=1), fleet_of("2xc7i.8xlarge"), large, rows=ROWS)
    assert plan.remedies and all(remedy.usd is not None for remedy in plan.remedies)


@pytest.mark.parametrize("machines", [fleet(), fleet_of("2xc7i.8xlarge")], ids=["this machine", "two of AWS"])
@pytest.mark.parametrize("steps", [5, 5000])
def test_epochs_and_steps_of_the_same_length_are_one_plan(machines: Fleet, steps: int) -> None:
    """Whether a checkpoint is written beside training depends on its length, not on how that is given."""
    asked, saving = config(steps=steps), {"checkpoint": CheckpointSection(every="100steps")}
    asked, in_epochs = asked.model_copy(update=saving), config(epochs=steps / 125).model_copy(update=saving)
    whole = make_plan(asked, machines, SMALL)
    counted = make_plan(in_epochs, machines, SMALL, rows=ROWS)
    assert counted.steps == steps and counted.memory == whole.memory
    before = make_plan(in_epochs, machines, SMALL)  # as train has it, before the rows are counted
    after = with_steps(before, in_epochs, machines, SMALL, steps)
    assert after.memory == whole.memory and after == replace(before, steps=steps, memory=whole.memory)
    assert (before.memory == whole.memory) == (steps > 100)


def test_shorter_rows_are_more_rows() -> None:
    assert (ROWS.of_length(64), ROWS.of_length(32), ROWS.of_length(128)) == (1000, 2000, 500)
