"""The plan's bytes on the wire, held to what the engines' own counters say, on real ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import ranks
from coremill.engines.shard.cost import table_parameters
from coremill.model.parameter_list import named_parameters
from coremill.plan.card import read_card
from coremill.plan.engine_cost import cost_of
from coremill.plan.trained import frozen_by, with_frozen
from coremill.plan.types import Arrangement
from tiny_models import make_config_folder, tiny_config
from training import make_packed, train_here

LENGTH, ROWS_PER_STEP = 16, 8
# Wider than the smallest test models: padding each parameter to a multiple of the ranks is then what it is in a real
# model, next to nothing.
SHAPE = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 512, "num_hidden_layers": 3}
SHAPES = {
    "llama": SHAPE,
    "llama-tied": SHAPE,
    "gemma2": SHAPE,  # whole logits, so backward needs the head again
    "llama-large-table": {**SHAPE, "vocab_size": 5000},  # so large that replicate sends named rows of it
}

CASES: dict[str, dict[str, Any]] = {
    "replicate": {"engine": "replicate", "wire_dtype": "fp32"},
    "replicate-memory": {"engine": "replicate", "wire_dtype": "fp32", "through_memory": True},
    "replicate-narrow": {"engine": "replicate", "wire_dtype": "auto"},
    "replicate-narrow-two-passes": {"engine": "replicate", "wire_dtype": "auto", "passes": 2},
    "shard": {"engine": "shard", "wire_dtype": "fp32", "through_memory": False},
    "shard-in-memory": {"engine": "shard", "wire_dtype": "fp32"},
    "shard-in-memory-two-passes": {"engine": "shard", "wire_dtype": "fp32", "passes": 2},
    "shard-narrow-two-passes": {"engine": "shard", "wire_dtype": "auto", "passes": 2},
    "shard-narrower-checkpointing": {"engine": "shard", "wire_dtype": "bf16", "checkpointing": True},
    "shard-keep": {"engine": "shard", "wire_dtype": "fp32", "keep_gathered": True, "through_memory": False},
    "shard-narrow-keep-two-passes": {"engine": "shard", "wire_dtype": "auto", "keep_gathered": True, "passes": 2},
    "shard-bf16-arithmetic": {"engine": "shard", "dtype": "bf16", "wire_dtype": "auto", "through_memory": False},
    "shard-bf16-arithmetic-in-memory": {"engine": "shard", "dtype": "bf16", "wire_dtype": "fp32"},
    "replicate-frozen-lookup": {"engine": "replicate", "wire_dtype": "fp32", "freeze": ("model.embed_tokens.*",)},
    "shard-frozen-lookup": {
        "engine": "shard",
        "wire_dtype": "fp32",
        "through_memory": False,
        "freeze": ("model.embed_tokens.*",),
    },
    "shard-frozen-half-two-passes": {
        "engine": "shard",
        "wire_dtype": "fp32",
        "through_memory": False,
        "passes": 2,
        "freeze": ("model.embed_tokens.*", "model.layers.[01].*"),
    },
    "shard-frozen-layer-in-memory": {"engine": "shard", "wire_dtype": "fp32", "freeze": ("model.layers.1.*",)},
}
RUNS = [
    (family, name)
    for family in SHAPES
    for name, case in CASES.items()
    if family != "llama-large-table" or case["engine"] == "replicate"
]


def bytes_by_case(world: Any, cases: dict[str, dict[str, Any]], common: dict[str, Any]) -> dict[str, list[int]]:
    """What this rank sends, and reads through memory, in the second step of each case; all in one process, for starting
    ranks takes longest."""
    results = {name: train_here(world, **common, **settings) for name, settings in cases.items()}
    return {name: [result["wire_bytes"][1], result["shared_bytes"][1]] for name, result in results.items()}


def _settings(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    rest = {key: value for key, value in case.items() if key != "passes"}
    return {**rest, "micro_batch_rows": ROWS_PER_STEP // world_size // case.get("passes", 1)}


@pytest.fixture(scope="module", params=[2, 4] if os.environ.get("COREMILL_LONG_TESTS") else [2])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Bytes by family, case and rank."""
    world_size: int = request.param
    folder = tmp_path_factory.mktemp("plan-wire")
    data = make_packed(folder / "data", rows=32, length=LENGTH, vocabulary=500).to_json()
    found: dict[str, Any] = {"world_size": world_size}
    for family, shape in SHAPES.items():
        make_config_folder(folder / family, family.removesuffix("-large-table"), **shape)
        common = {"model_folder": str(folder / family), "data": data, "weights": "random", "steps": 2}
        common["rows_per_step"] = ROWS_PER_STEP
        cases = {name: _settings(CASES[name], world_size) for of, name in RUNS if of == family}
        found[family] = ranks.run_ranks(bytes_by_case, world_size, cases=cases, common=common)
    return found


def _planned(family: str, world_size: int, settings: dict[str, Any]) -> tuple[list[int], int]:
    """Bytes sent and shared, and what they may be off by: a plan does not know which tokens will come."""
    one_host = settings.get("through_memory", settings["engine"] == "shard")
    arrangement = Arrangement(
        engine=settings["engine"],
        optimizer="adamw",
        dtype=settings.get("dtype", "fp32"),
        wire_dtype=settings["wire_dtype"],
        nodes=1 if one_host else world_size,
        ranks_per_node=world_size if one_host else 1,
        threads_per_rank=1,
        sequence_length=LENGTH,
        micro_batch_rows=settings["micro_batch_rows"],
        accumulation_steps=ROWS_PER_STEP // world_size // settings["micro_batch_rows"],
        activation_checkpointing=settings.get("checkpointing", False),
        keep_gathered=settings.get("keep_gathered", False),
        attention="sdpa",
    )
    config = tiny_config(family.removesuffix("-large-table"), **SHAPES[family])
    card = read_card(config=config)
    if freeze := settings.get("freeze"):
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        model.tie_weights()
        card = with_frozen(card, frozen_by(named_parameters(model), freeze))
    traffic = cost_of(arrangement).traffic(card, arrangement)
    rows = 0
    if settings["engine"] == "replicate":
        rows = ROWS_PER_STEP * LENGTH if family == "llama-large-table" else 0
    elif not traffic.through_memory and table_parameters(card, arrangement):
        rows = ROWS_PER_STEP // world_size * LENGTH
    # Of each row at most all of it, there and back, in fp32; the few numbers that end a step are left out.
    return [traffic.wire_bytes, traffic.shared_bytes], rows * card.hidden * 8 * (world_size - 1) // world_size + 100


@pytest.mark.parametrize(("family", "name"), RUNS)
def test_planned_bytes_are_those_the_engines_count(measured: dict[str, Any], family: str, name: str) -> None:
    world_size = measured["world_size"]
    planned, off_by = _planned(family, world_size, _settings(CASES[name], world_size))
    for rank in measured[family]:
        assert rank[name] == pytest.approx(planned, rel=0.03, abs=off_by)
