"""Between the data and the first step: how many steps there are, and what a step may hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coremill.config.schema import RunConfig
from coremill.data.packed import PackedData
from coremill.errors import InputError
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan
from coremill.run.prepare import count_steps, plan_for_rows, words_of_few_held_out, words_of_smaller_step
from unit.plan.shapes import LLAMA_50M, fleet

SMALL = read_card(config=LLAMA_50M, name="small")


def config(**train: Any) -> RunConfig:
    return RunConfig.model_validate({"data": {"sequence_length": 64}, "train": {"tokens_per_step": 512, **train}})


def rows(count: int) -> PackedData:
    return PackedData(
        folder=Path("data"),
        evaluation_folder=None,
        key="key",
        train_rows=count,
        evaluation_rows=0,
        sequence_length=64,
        tokens=count * 64,
        dropped_tokens=0,
        documents=1,
        eos_id=0,
        from_cache=True,
        seconds=0.0,
    )


def steps_of(asked: RunConfig, data: PackedData) -> int:
    return count_steps(asked, data, plan_for_rows(asked, fleet(), SMALL, data))


def test_epochs_become_whole_steps() -> None:
    assert steps_of(config(steps=3, warmup_steps=2), rows(80)) == 3
    assert steps_of(config(epochs=1), rows(80)) == 10
    assert steps_of(config(epochs=0.25), rows(80)) == 2
    assert steps_of(config(epochs=0.01), rows(80)) == 1


@pytest.mark.parametrize(("epochs", "warmup", "steps"), [(1.0, 10, 10), (0.01, 1, 1), (2.0, 500, 20)])
def test_a_warm_up_longer_than_the_epochs_is_refused(epochs: float, warmup: int, steps: int) -> None:
    with pytest.raises(InputError) as caught:
        steps_of(config(epochs=epochs, warmup_steps=warmup), rows(80))
    message = str(caught.value)
    assert f"train.warmup_steps ({warmup}) is not below the {steps} steps of the run" in message
    assert f"at most {steps - 1}" in message and caught.value.where == f"train.warmup_steps: {warmup}"
    assert steps_of(config(epochs=2, warmup_steps=19), rows(80)) == 20


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_holds_no_row_twice(ranks: int) -> None:
    """0.1.0 went through five rows again and again within one step of eight."""
    asked = config(epochs=3).model_copy(
        update={"parallel": RunConfig().parallel.model_copy(update={"ranks_per_node": ranks})}
    )
    data = rows(5)
    plan = plan_for_rows(asked, fleet(), SMALL, data)
    assert plan.rows_per_step == 5 and plan.world_size == ranks
    assert plan.micro_batch_rows.value * plan.accumulation_steps.value * ranks >= 5
    assert count_steps(asked, data, plan) == 3
    words = words_of_smaller_step(asked, data)
    assert words == (
        "the text fills 5 rows, fewer than the 8 of a step (train.tokens_per_step 512):"
        " a step takes each once, 320 tokens"
    )
    assert words in plan.accumulation_steps.reason


def test_enough_rows_change_nothing() -> None:
    asked = config(steps=3)
    assert words_of_smaller_step(asked, rows(8)) == ""
    assert plan_for_rows(asked, fleet(), SMALL, rows(8)) == make_plan(asked, fleet(), SMALL)


@pytest.mark.parametrize(
    ("held_out", "said"), [(1, "warning: 1 row held out"), (3, "warning: 3 rows held out"), (4, ""), (0, "")]
)
def test_an_evaluation_on_next_to_nothing_is_said(held_out: int, said: str) -> None:
    words = "held out for evaluation: so many" if held_out else ""
    data = replace(rows(60), evaluation_rows=held_out, evaluation_words=words)
    found = words_of_few_held_out(data)
    assert found.startswith(said) and bool(found) == bool(said)
    assert words_of_few_held_out(replace(data, evaluation_words="")) == ""  # the user named what to evaluate on
