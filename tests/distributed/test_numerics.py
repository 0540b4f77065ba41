"""Real ranks meet numbers that are none: all agree, weights stay, rank and rows are named, skips survive a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import ranks
from coremill.checkpoint.manifest import survey
from saved_training import train_saved
from tiers import some_long
from tiny_models import make_model
from training import make_packed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("numerics")
    make_model(folder / "llama", "llama")
    data = make_packed(folder / "data", rows=128, length=16, vocabulary=90)
    return {"model_folder": str(folder / "llama"), "data": data.to_json()}


def run(inputs: dict[str, Any], folder: Path, world_size: int = 2, **settings: Any) -> list[dict[str, Any]]:
    return ranks.run_ranks(train_saved, world_size, folder=str(folder), **inputs, **settings)


def found(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in result["events"] if event["kind"] == "non_finite"]


@pytest.mark.parametrize(("engine", "fault"), [("replicate", "gradient"), ("shard", "gradient"), ("shard", "loss")])
def test_stop_names_step_rank_and_rows_and_leaves_the_weights(inputs, tmp_path, engine, fault):
    before = run(inputs, tmp_path / "before", engine=engine, steps=16, stop_at=4)
    results = run(inputs, tmp_path / "fault", engine=engine, steps=16, **{f"bad_{fault}_at": (5,)})
    rows = results[1]["bad_rows"][5]
    what = "the loss is nan" if fault == "loss" else "the gradient is not finite"
    for result, clean in zip(results, before, strict=True):
        assert list(result["losses"]) == [1, 2, 3, 4]
        assert result["digest"] == clean["digest"]
        first = result["ended"].splitlines()[0]
        assert first == f"step 5: {what} on rank 1 in rows {', '.join(map(str, rows))}"
        (event,) = found(result)
        assert event["culprits"] == [{"rank": 1, "what": what, "rows": rows}] and not event["skipped"]
    assert [each.step for each in survey(tmp_path / "fault" / "checkpoints").sound] == [4]


@pytest.mark.parametrize(
    ("engine", "dtype", "fault"),
    some_long(
        [("shard", "fp32", "loss"), ("replicate", "bf16", "gradient")],
        [("shard", "fp32", "loss")],
        "one of two engines; what stops a run is tried with both",
    ),
)
def test_skip_leaves_steps_out_and_goes_on_with_the_same_bits_after_a_kill(inputs, tmp_path, engine, dtype, fault):
    settings = {"engine": engine, "dtype": dtype, "on_non_finite": "skip", f"bad_{fault}_at": (3, 6, 11)}
    whole = run(inputs, tmp_path / "whole", **settings)
    for result in whole:
        assert result["ended"] == "done" and result["skipped"] == [3, 6, 11]
        assert all(math.isfinite(loss) for step, loss in result["losses"].items() if step not in (3, 6, 11))
        assert [event["skipped_so_far"] for event in found(result)] == [1, 2, 3]
    with pytest.raises(ranks.RankError):
        run(inputs, tmp_path / "killed", kill_at=9, slow_writes=True, **settings)
    again = run(inputs, tmp_path / "killed", **settings)
    for result, expected in zip(again, whole, strict=True):
        assert result["first_step"] in (5, 9) and result["skipped"] == [s for s in (6, 11) if s >= result["first_step"]]
        assert result["digest"] == expected["digest"]
        assert found(result)[-1]["skipped_so_far"] == 3  # those before the kill count


def test_a_spent_budget_ends_the_run_also_where_it_was_spent_before_a_stop(inputs, tmp_path):
    settings = {"on_non_finite": "skip", "skip_budget": 2, "bad_loss_at": (3, 6, 11)}
    run(inputs, tmp_path, stop_at=8, **settings)
    for result in run(inputs, tmp_path, **settings):
        assert result["first_step"] == 9 and max(result["losses"]) == 10
        assert "step 11: the loss is nan on rank 1" in result["ended"]
        assert "the budget of 2 skipped steps is spent (steps 3, 6)" in result["ended"]


def test_weights_that_are_none_end_the_run_whatever_the_budget(inputs, tmp_path):
    for result in run(inputs, tmp_path, on_non_finite="skip", skip_budget=3, poison_at=6):
        assert result["skipped"] == [6, 7, 8] and "step 9: the loss is nan on rank 0" in result["ended"]
    assert [each.step for each in survey(tmp_path / "checkpoints").sound] == [4]
