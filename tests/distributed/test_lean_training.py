"""adamw-8bit and updates inside of backward: the same numbers however the work is shared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import ranks
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
