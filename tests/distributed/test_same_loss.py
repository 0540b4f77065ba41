"""The same numbers however the work is shared: ranks, engines, micro-batches, wire, checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ranks
from tiny_models import make_model
from training import make_packed, train_here

LENGTH, ROWS = 24, 64


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("same-loss")
    for family in FAMILIES:
        make_model(folder / family, family)
    vocabulary = 90
    data = make_packed(folder / "data", rows=ROWS, length=LENGTH, vocabulary=vocabulary)
    return {"folder": folder, "data": data.to_json(), "references": {}}


FAMILIES = ["llama", "llama-tied", "qwen2", "mistral", "gemma", "gemma2", "gpt2", "gpt_neox", "phi"]


def _run(inputs: dict[str, Any], family: str, world_size: int, **settings: Any) -> list[dict[str, Any]]:
    folder: Path = inputs["folder"]
    return ranks.run_ranks(train_here, world_size, model_folder=str(folder / family), data=inputs["data"], **settings)


def _reference(inputs: dict[str, Any], family: str, **settings: Any) -> dict[str, Any]:
    """One rank, whole model, one forward pass per step."""
    key = (family, *sorted(settings.items()))
    if key not in inputs["references"]:
        inputs["references"][key] = _run(inputs, family, 1, **settings)[0]
    return inputs["references"][key]


def _assert_same(results: list[dict[str, Any]], reference: dict[str, Any], relative: float = 1e-5) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=relative)
        assert result["norms"] == pytest.approx(reference["norms"], rel=100 * relative)


@pytest.mark.parametrize("micro_batch_rows", [8, 2])
@pytest.mark.parametrize("engine", ["replicate", "shard"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_engines_and_accumulation_give_the_same_20_losses(inputs, world_size, engine, micro_batch_rows):
    results = _run(inputs, "llama", world_size, engine=engine, micro_batch_rows=min(micro_batch_rows, 8 // world_size))
    _assert_same(results, _reference(inputs, "llama"))


@pytest.mark.parametrize(
    "settings",
    [
        {"world_size": 2, "engine": "shard", "micro_batch_rows": 2, "keep_gathered": True},
        {"world_size": 2, "engine": "shard", "checkpointing": True},
        {"world_size": 2, "engine": "replicate", "checkpointing": True},
        {"world_size": 3, "engine": "shard", "micro_batch_rows": 2},
        {"world_size": 3, "engine": "replicate", "micro_batch_rows": 3},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_every_other_way_to_share_gives_the_same_losses(inputs, family, settings):
    settings = {"micro_batch_rows": 4, **settings}
    _assert_same(_run(inputs, family, **settings), _reference(inputs, family))


FROZEN = {
    "lower half": {"freeze": ("model.embed_tokens.*", "model.layers.0.*"), "no_decay": ("*.mlp.*",)},
    "layers above the lookup": {"freeze": ("model.layers.*.mlp.*", "model.layers.0.*")},
}


@pytest.mark.parametrize(("family", "frozen"), [("llama", "layers above the lookup"), ("llama-tied", "lower half")])
@pytest.mark.parametrize(
    "settings",
    [
        {"world_size": 2, "engine": "replicate"},
        {"world_size": 2, "engine": "shard", "through_memory": False},
        {"world_size": 4, "engine": "shard"},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
def test_what_is_frozen_is_frozen_on_every_rank(inputs, frozen, family, settings):
    """Also at two passes a step, and by one name of a tied weight."""
    reference = _reference(inputs, family, **FROZEN[frozen])
    assert reference["losses"][-1] != pytest.approx(_reference(inputs, family)["losses"][-1], rel=1e-5)
    _assert_same(_run(inputs, family, micro_batch_rows=1, **settings, **FROZEN[frozen]), reference)


@pytest.mark.parametrize("engine", ["replicate", "shard"])
def test_rows_that_do_not_divide_by_the_ranks(inputs, engine):
    reference = _reference(inputs, "llama", rows_per_step=7)
    results = _run(inputs, "llama", 3, engine=engine, rows_per_step=7, micro_batch_rows=1)
    _assert_same(results, reference)


@pytest.mark.parametrize("engine", ["replicate", "shard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_alike_in_both_engines(inputs, family, engine):
    reference = _reference(inputs, family, steps=6)
    results = _run(inputs, family, 2, engine=engine, micro_batch_rows=4, steps=6)
    _assert_same(results, reference)
    assert results[0]["loss_path"] == ("logits" if family == "gemma2" else "chunked")
    assert results[0]["layers"] == ("as they are" if family in ("gpt2", "gpt_neox", "phi") else "fused")


@pytest.mark.parametrize(("world_size", "engine"), [(1, "replicate"), (2, "replicate"), (2, "shard")])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_as_transformers_wrote_it_losses_are_the_same_and_no_forward_is_replaced(inputs, family, world_size, engine):
    results = _run(inputs, family, world_size, engine=engine, micro_batch_rows=4, fused=False)
    _assert_same(results, _reference(inputs, family))
    for result in results:
        assert result["replaced"] == [] and not result["own_loss_function"]
        assert {name: result["choices"][name] for name in ("layers", "rows")} == {
            "layers": "off: model.fused is false",
            "rows": "off: model.fused is false",
        }
        assert result["loss_path"] == "logits"
        assert result["choices"]["loss"].startswith("off: model.fused is false, so whole logits are made")
    assert _reference(inputs, family)["replaced"] != []


def test_as_transformers_wrote_it_the_lookup_is_gathered_whole_between_hosts(inputs):
    """FSDP2 changes the types of modules; the lookup's forward stays its own."""
    settings = {"engine": "shard", "micro_batch_rows": 4, "through_memory": False, "steps": 4}
    whole, rows = (_run(inputs, "llama", 2, fused=fused, **settings) for fused in (False, True))
    _assert_same(whole, rows[0])
    assert whole[0]["wire_bytes"][2] > rows[0]["wire_bytes"][2]


@pytest.mark.parametrize("engine", ["replicate", "shard"])
def test_documents_kept_apart_on_two_ranks(inputs, engine):
    reference = _reference(inputs, "llama", across_documents=False)
    _assert_same(_run(inputs, "llama", 2, engine=engine, micro_batch_rows=4, across_documents=False), reference)
    assert reference["losses"] != _reference(inputs, "llama")["losses"]


@pytest.mark.parametrize(
    ("engine", "wire_dtype", "relative"),
    [
        ("replicate", "auto", 5e-4),
        ("shard", "auto", 5e-4),
        ("shard", "bf16", 5e-3),
    ],
)
def test_a_narrower_wire_moves_half_the_bytes_and_almost_the_same_loss(inputs, engine, wire_dtype, relative):
    exact = _run(inputs, "llama", 2, engine=engine, micro_batch_rows=4, through_memory=False)
    narrow = _run(inputs, "llama", 2, engine=engine, micro_batch_rows=4, wire_dtype=wire_dtype)
    _assert_same(narrow, exact[0], relative)
    share = narrow[0]["wire_bytes"][5] / exact[0]["wire_bytes"][5]
    expected = {("replicate", "auto"): 0.5, ("shard", "auto"): 0.83, ("shard", "bf16"): 0.5}[engine, wire_dtype]
    assert share == pytest.approx(expected, abs=0.04)


def test_random_weights_train_alike_on_any_number_of_ranks(inputs):
    reference = _reference(inputs, "llama", weights="random", steps=5)
    for world_size in (2, 4):
        _assert_same(
            _run(inputs, "llama", world_size, engine="shard", weights="random", micro_batch_rows=2, steps=5), reference
        )


@pytest.mark.parametrize(
    ("world_size", "engine", "micro_batch_rows"),
    [(1, "replicate", 8), (1, "replicate", 2), (2, "replicate", 2), (2, "shard", 2)],
)
def test_bf16_arithmetic_follows_fp32(inputs, world_size, engine, micro_batch_rows):
    """Tiny products: emulated bf16 is slow but there; masters and fp32 sums keep the losses together."""
    reference = _reference(inputs, "llama", steps=6)
    results = _run(inputs, "llama", world_size, engine=engine, dtype="bf16", micro_batch_rows=micro_batch_rows, steps=6)
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-2)
