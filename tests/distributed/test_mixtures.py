"""Mixtures of experts however the work is shared: the balance among experts, and routers that stay in fp32."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ranks
from saved_training import train_saved
from tiers import some_long
from tiny_models import VOCABULARY, make_model
from training import make_packed, train_here

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
WAYS = {
    "replicate": {"engine": "replicate"},
    "memory": {"engine": "shard"},
    "wire": {"engine": "shard", "through_memory": False},
    "wire, activations made twice": {"engine": "shard", "through_memory": False, "checkpointing": True},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mixtures")
    make_model(folder / "balanced", "mixtral", **BALANCED)
    make_model(folder / "router", "ernie4_5_moe")
    make_model(folder / "head", "hy_v4")
    make_model(folder / "tied head", "hy_v4", tie_word_embeddings=True)
    data = make_packed(folder / "data", rows=64, length=24, vocabulary=90)
    return {"folder": folder, "data": data.to_json()}


def run(inputs: dict[str, Any], what: Any, model: str, world_size: int, **settings: Any) -> list[dict[str, Any]]:
    settings = {"model_folder": str(inputs["folder"] / model), "data": inputs["data"], "steps": 3, **settings}
    results: list[dict[str, Any]] = ranks.run_ranks(what, world_size, **settings)
    return results


def own_losses(world: Any, *, model_folder: str, data: dict[str, Any], **_: Any) -> float:
    """By transformers alone: the first step's loss, a mean over two micro-batches of equally many targets."""
    import torch
    from transformers import AutoModelForCausalLM

    from coremill.data.packed import PackedData
    from coremill.data.packed_batches import make_loader

    loader = make_loader(
        PackedData.from_json(data),
        seed=5,
        rows_per_step=8,
        rank=0,
        world_size=1,
        micro_batch_rows=4,
        accumulation_steps=2,
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder).train()
    batches = loader.next_step().batches
    with torch.no_grad():
        return sum(float(model(input_ids=each.input_ids, labels=each.labels).loss) for each in batches) / len(batches)


@pytest.fixture(scope="module")
def balanced(inputs: dict[str, Any]) -> dict[str, Any]:
    """One rank, two micro-batches a step: what two ranks with one each have to equal."""
    return run(inputs, train_here, "balanced", 1, micro_batch_rows=4)[0]


def test_the_balance_is_in_the_loss_as_transformers_has_it(inputs, balanced):
    assert balanced["loss_path"] == "chunked"
    assert balanced["losses"][0] == pytest.approx(run(inputs, own_losses, "balanced", 1)[0], rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_the_balance_is_the_same_on_two_ranks(inputs, balanced, way):
    for result in run(inputs, train_here, "balanced", 2, micro_batch_rows=4, **WAYS[way]):
        assert result["losses"] == pytest.approx(balanced["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(balanced["norms"], rel=1e-3)


def train_and_look(world: Any, **settings: Any) -> dict[str, Any]:
    """A run, and in which dtype its modules had their weights when they were called."""
    from torch.distributed.tensor import DTensor
    from torch.nn.modules.module import register_module_forward_pre_hook

    seen: dict[str, set[str]] = {}

    def look(module: Any, _: Any) -> None:
        weight = module._parameters.get("weight")
        if weight is not None and not weight.is_meta and not isinstance(weight, DTensor):  # not to be computed with
            kind = "head" if type(module).__name__ == "Linear" and len(weight) == VOCABULARY else type(module).__name__
            seen.setdefault(kind, set()).add(str(weight.dtype))

    handle = register_module_forward_pre_hook(look)
    try:
        return {**train_here(world, **settings), "seen": {name: sorted(dtypes) for name, dtypes in seen.items()}}
    finally:
        handle.remove()


@pytest.mark.parametrize(("way", "world_size"), [("replicate", 1), ("replicate", 2), ("memory", 2), ("wire", 2)])
def test_what_a_model_wants_in_fp32_stays_so_in_bf16(inputs, tmp_path: Path, way, world_size):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    settings = {**WAYS[way], "micro_batch_rows": 4, "dtype": "bf16"}
    exports = {"export_to": str(tmp_path / "export"), "export_dtype": "bfloat16"}
    results = run(inputs, train_and_look, "router", world_size, **settings, **exports)
    for result in results:
        assert result["seen"]["Ernie4_5_MoeTopKRouter"] == ["torch.float32"]
        assert result["seen"]["Linear"] == ["torch.bfloat16"]
        assert result["losses"] == results[0]["losses"]
    exact = run(inputs, train_here, "router", 1, micro_batch_rows=4)[0]
    assert results[0]["losses"] == pytest.approx(exact["losses"], rel=1e-2)
    assert results[0]["norms"] == pytest.approx(exact["norms"], rel=5e-2)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (inputs["folder"] / "router", tmp_path / "export")
    )
    router = "model.layers.0.mlp.gate.weight"
    assert str(after[router].dtype) == "torch.float32" and str(after["lm_head.weight"].dtype) == "torch.bfloat16"
    assert not after[router].equal(before[router])  # it was trained
    assert not after[router].equal(after[router].bfloat16().float())  # and never rounded
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert str(again.model.layers[0].mlp.gate.weight.dtype) == "torch.float32"


def test_a_run_with_an_fp32_router_goes_on_from_its_checkpoint(inputs, tmp_path: Path):
    """With the same bits on as many ranks; on another number of ranks and the other engine with the same numbers."""
    settings: dict[str, Any] = {"dtype": "bf16", "steps": 4, "every": "2steps"}
    reference = run(inputs, train_saved, "router", 2, folder=str(tmp_path / "whole"), engine="shard", **settings)
    run(inputs, train_saved, "router", 2, folder=str(tmp_path / "shard"), engine="shard", stop_at=2, **settings)
    shutil.copytree(tmp_path / "shard", tmp_path / "replicate")
    for world_size, engine in ((2, "shard"), (1, "replicate")):
        again = run(inputs, train_saved, "router", world_size, folder=str(tmp_path / engine), engine=engine, **settings)
        assert again[0]["first_step"] == 3
        if world_size == 2:
            assert [result["digest"] for result in again] == [result["digest"] for result in reference]
        expected = {step: loss for step, loss in reference[0]["losses"].items() if step > 2}
        assert again[0]["losses"] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("way", "model"),
    some_long(
        [(way, model) for way in ("replicate", "memory", "wire") for model in ("head", "tied head")],
        [("replicate", "head"), ("memory", "tied head"), ("wire", "head")],
        "each way with one of two heads",
    ),
)
def test_a_head_that_a_model_wants_in_fp32(inputs, model, way):
    """In fp32 unless it is the lookup's table too: transformers loads that in bf16."""
    results = run(inputs, train_and_look, model, 2, micro_batch_rows=4, dtype="bf16", **WAYS[way])
    exact = run(inputs, train_here, model, 1, micro_batch_rows=4)[0]
    for result in results:
        expected = ["torch.float32"] if model == "head" else ["torch.bfloat16"]
        assert result["seen"].get("head", expected) == expected  # a sharded one is not looked at
        assert result["losses"] == pytest.approx(exact["losses"], rel=1e-2)
        assert result["norms"] == pytest.approx(exact["norms"], rel=5e-2)


def train_and_give_back(world: Any, **settings: Any) -> dict[str, Any]:
    """A run that lets go of others' rows after each use, as a large model's does."""
    from coremill.engines.one_host import engine as one_host

    one_host.RESIDENT_UP_TO_BYTES = 0  # this process is only for this
    return train_here(world, **settings)


@pytest.mark.parametrize("model", ["router", "head"])
def test_others_rows_are_given_back_beside_fp32_weights(inputs, model):
    settings = {"micro_batch_rows": 4, "dtype": "bf16", "engine": "shard"}
    resident = run(inputs, train_here, model, 2, **settings)
    assert [each["losses"] for each in run(inputs, train_and_give_back, model, 2, **settings)] == [
        each["losses"] for each in resident
    ]
