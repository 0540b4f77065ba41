"""adamw-8bit and updates inside of backward: the same numbers however the work is shared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import ranks
from saved_training import train_saved
from tiny_models import make_model
from training import make_packed, train_here

LONG = pytest.mark.skipif("COREMILL_LONG_TESTS" not in os.environ, reason="make test-long")

WAYS = {
    "8bit": {"optimizer": "adamw-8bit"},
    "8bit inside": {"optimizer": "adamw-8bit", "update": "inside"},
    "inside": {"update": "inside"},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lean")
    for family in ("llama", "llama-tied"):
        make_model(folder / family, family)
    data = make_packed(folder / "data", rows=64, length=24, vocabulary=90)
    return {"folder": folder, "data": data.to_json(), "references": {}}


def _run(inputs: dict[str, Any], family: str, world_size: int, **settings: Any) -> list[dict[str, Any]]:
    folder: Path = inputs["folder"]
    return ranks.run_ranks(train_here, world_size, model_folder=str(folder / family), data=inputs["data"], **settings)


def _reference(inputs: dict[str, Any], family: str, way: str, **settings: Any) -> dict[str, Any]:
    """One rank, whole model, one forward pass per step."""
    key = (family, way, *sorted(settings.items()))
    if key not in inputs["references"]:
        inputs["references"][key] = _run(inputs, family, 1, **WAYS[way], **settings)[0]
    return inputs["references"][key]


SHARED = [
    (2, {"engine": "replicate"}),
    (2, {"engine": "shard"}),
    (2, {"engine": "shard", "through_memory": False}),
    (4, {"engine": "replicate"}),
    (4, {"engine": "shard"}),
    (4, {"engine": "shard", "through_memory": False}),
    (2, {"engine": "replicate", "micro_batch_rows": 2}),
    (2, {"engine": "shard", "micro_batch_rows": 2}),
    (2, {"engine": "shard", "micro_batch_rows": 2, "through_memory": False}),
    (2, {"engine": "shard", "micro_batch_rows": 2, "through_memory": False, "keep_gathered": True}),
    (3, {"engine": "shard", "checkpointing": True}),
    (1, {"engine": "shard"}),
]


def _name(value: Any) -> str:
    return "-".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


@LONG
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize(("world_size", "settings"), SHARED, ids=_name)
def test_every_way_to_share_gives_the_same_losses(inputs, family, way, world_size, settings):
    reference = _reference(inputs, family, way)
    for result in _run(inputs, family, world_size, **WAYS[way], **settings):
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(reference["norms"], rel=1e-3)


BF16 = [
    (1, {"engine": "replicate"}),
    (2, {"engine": "replicate"}),
    (2, {"engine": "shard"}),
    (2, {"engine": "shard", "through_memory": False}),
]


@LONG
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world_size", "settings"), BF16, ids=_name)
def test_bf16_follows_fp32(inputs, way, world_size, settings):
    """Weights without a copy in fp32, and masters that are moved inside of backward."""
    settings = {"steps": 6, "dtype": "bf16", "wire_dtype": "auto", **settings}
    reference = _reference(inputs, "llama", way, steps=6)
    for result in _run(inputs, "llama", world_size, **WAYS[way], **settings):
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-2)
        assert result["losses"][-1] < result["losses"][0]


def _saved(inputs: dict[str, Any], world_size: int, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    source = str(inputs["folder"] / "llama")
    settings = {"rows_per_step": 4, "micro_batch_rows": 4, **settings}
    return ranks.run_ranks(
        train_saved, world_size, folder=str(folder), model_folder=source, data=inputs["data"], **settings
    )


LEAN = {"optimizer": "adamw-8bit", "update": "inside"}


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {**LEAN, "dtype": "bf16"}),
        pytest.param(2, {**LEAN, "engine": "shard"}, marks=LONG),
        pytest.param(2, {**LEAN, "engine": "replicate", "dtype": "bf16", "wire_dtype": "auto"}, marks=LONG),
        pytest.param(2, {**LEAN, "engine": "shard", "dtype": "bf16", "wire_dtype": "auto"}, marks=LONG),
        pytest.param(2, {"optimizer": "adamw-8bit", "engine": "shard"}, marks=LONG),
        pytest.param(1, {"update": "inside"}, marks=LONG),
    ],
    ids=_name,
)
def test_killed_it_goes_on_with_the_same_bits(inputs, tmp_path, world_size, settings):
    """Moments, what is clipped by and random bits are those of a run that was not interrupted."""
    reference = _saved(inputs, world_size, tmp_path / "whole", **settings)
    with pytest.raises(ranks.RankError) as caught:
        _saved(inputs, world_size, tmp_path / "killed", kill_at=11, **settings)
    assert caught.value.kind == "died"
    for result, expected in zip(_saved(inputs, world_size, tmp_path / "killed", **settings), reference, strict=True):
        assert 1 < result["first_step"] <= 11
        assert result["digest"] == expected["digest"]
        assert all(expected["losses"][step] == loss for step, loss in result["losses"].items())


@LONG
@pytest.mark.parametrize("update", ["after", "inside"])
def test_other_ranks_and_engines_go_on_with_the_same_numbers(inputs, tmp_path, update):
    settings = {"optimizer": "adamw-8bit", "update": update}
    reference = _saved(inputs, 1, tmp_path / "whole", **settings)[0]
    _saved(inputs, 1, tmp_path / "cut", stop_at=5, **settings)
    for stop_at, world_size, engine in ((9, 4, "shard"), (13, 2, "replicate"), (None, 3, "shard")):
        for result in _saved(inputs, world_size, tmp_path / "cut", stop_at=stop_at, engine=engine, **settings):
            losses = {step: reference["losses"][step] for step in result["losses"]}
            assert result["losses"] == pytest.approx(losses, rel=1e-5)
    assert min(result["losses"]) > 12 and max(result["losses"]) == 16


@LONG
def test_optimizers_and_updates_may_change(inputs, tmp_path):
    """To 8 bits and back: the losses of adamw, by little."""
    reference = _saved(inputs, 1, tmp_path / "whole")[0]
    _saved(inputs, 1, tmp_path / "changed", stop_at=5)
    _saved(inputs, 1, tmp_path / "changed", stop_at=9, **LEAN)
    changed = _saved(inputs, 2, tmp_path / "changed", engine="shard", update="inside")[0]
    assert min(changed["losses"]) == 10
    assert changed["losses"] == pytest.approx({step: reference["losses"][step] for step in changed["losses"]}, rel=0.01)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=LONG)])
def test_a_gradient_that_is_not_finite_ends_the_run_and_a_loss_is_left_out(inputs, tmp_path, world_size):
    engine = "replicate" if world_size == 1 else "shard"
    skip = {"on_non_finite": "skip", "every": "2steps", "engine": engine, **LEAN}
    for result in _saved(inputs, world_size, tmp_path / "loss", bad_loss_at=(6,), **skip):
        assert (result["ended"], result["skipped"]) == ("done", [6])
    for result in _saved(inputs, world_size, tmp_path / "gradient", bad_gradient_at=(6,), **skip):
        assert "step 6" in result["ended"] and "a gradient is not finite" in result["ended"]
        assert "train.update" in result["ended"]
    for result in _saved(inputs, world_size, tmp_path / "gradient", **skip):  # without it
        assert (result["first_step"], result["ended"]) == (5, "done")
