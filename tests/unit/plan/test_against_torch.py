"""Counts and kept activations of every known family, held to the real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from coremill.model.lean import make_lean
from coremill.plan.activations import ends_bytes_per_token, layer_bytes_per_token
from coremill.plan.activations import kept_bytes as planned_bytes
from coremill.plan.card import ModelCard, read_card
from coremill.plan.types import Arrangement
from unit.plan.shapes import TINY_CONFIGS

ROWS, LENGTH = 2, 64
SDPA_REFUSED = {"gemma2"}  # transformers has no SDPA for it: the soft cap needs the matrix


def config_of(values: dict[str, Any]) -> PretrainedConfig:
    rest = {key: value for key, value in values.items() if key != "model_type"}
    config: PretrainedConfig = CONFIG_MAPPING[values["model_type"]](**rest)
    config.eos_token_id = config.bos_token_id = None
    return config


def arrangement(dtype: str, attention: str) -> Arrangement:
    return Arrangement(
        engine="replicate",
        dtype=dtype,  # type: ignore[arg-type]
        wire_dtype="auto",
        nodes=1,
        ranks_per_node=1,
        threads_per_rank=1,
        sequence_length=LENGTH,
        micro_batch_rows=ROWS,
        accumulation_steps=1,
        activation_checkpointing=False,
        keep_gathered=False,
        attention=attention,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_counts_from_the_config_alone_are_those_of_the_model(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(TINY_CONFIGS[name]))
    card = read_card(config=TINY_CONFIGS[name])

    assert card.parameters == sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    assert card.vocabulary_rows == embedding.shape[0]
    assert card.tied == (head.weight is embedding)
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    assert card.layer_parameters == tuple(sum(p.numel() for p in layer.parameters()) for layer in layers)
    in_layers = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() == 2)
    # Merged experts have three dimensions; a token goes to some of them.
    merged = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() == 3)
    in_layers += merged * card.experts_per_token // max(1, card.experts)
    assert card.matmul_parameters == in_layers + head.weight.numel()
    assert sum(card.groups) == card.parameters


def test_defaults_of_left_out_keys_are_those_of_transformers() -> None:
    for family in sorted({values["model_type"] for values in TINY_CONFIGS.values()}):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family]())
        assert read_card(config={"model_type": family}).parameters == sum(p.numel() for p in model.parameters()), family


def kept_bytes(
    values: dict[str, Any], layers: int, dtype: torch.dtype, attention: str, *, documents_apart: bool = False
) -> int:
    """What autograd really keeps of one forward pass of the base model, parameters aside."""
    values = with_layers(values, layers)
    model = AutoModelForCausalLM.from_config(config_of(values), attn_implementation=attention).to(dtype).train()
    make_lean(model)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept.setdefault(storage.data_ptr(), storage)  # holding it keeps its address from being used again
        return tensor

    # One bf16 product on a CPU without bf16 units would switch oneDNN off for the tests that follow.
    with torch.backends.mkldnn.flags(enabled=dtype == torch.float32):
        inputs = {"input_ids": torch.randint(0, 200, (ROWS, LENGTH))}
        if documents_apart:
            inputs["position_ids"] = torch.arange(LENGTH).remainder(LENGTH // 2).repeat(ROWS, 1)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.base_model(**inputs, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_a_layer_keeps_what_the_plan_says(name: str, dtype: str, attention: str) -> None:
    if name in SDPA_REFUSED and attention == "sdpa":
        pytest.skip("transformers refuses")
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    values = TINY_CONFIGS[name]
    measured = kept_bytes(values, 2, torch_dtype, attention) - kept_bytes(values, 1, torch_dtype, attention)
    assert planned_layer(name, arrangement(dtype, attention)) == pytest.approx(measured, rel=0.005)


def planned_layer(name: str, one: Arrangement) -> int:
    """What the plan has for the second layer."""
    two, first = (read_card(config=with_layers(TINY_CONFIGS[name], layers)) for layers in (2, 1))
    return planned_bytes(two, one) - planned_bytes(first, one)


def with_layers(values: dict[str, Any], layers: int) -> dict[str, Any]:
    return {**values, "n_layer" if "n_layer" in values else "num_hidden_layers": layers}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "llama-biased", "mistral-window", "qwen3", "phi3", "gpt_neox", "mixtral"])
def test_with_documents_apart_every_layer_keeps_a_mask(name: str, dtype: str) -> None:
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    two, first = (
        kept_bytes(TINY_CONFIGS[name], layers, torch_dtype, "sdpa", documents_apart=True) for layers in (2, 1)
    )
    apart = replace(arrangement(dtype, "sdpa"), documents_apart=True)
    assert planned_layer(name, apart) == pytest.approx(two - first, rel=0.005)


def test_ends_are_small_beside_the_layers() -> None:
    card = read_card(config=TINY_CONFIGS["llama"])
    one = arrangement("fp32", "sdpa")
    measured = kept_bytes(TINY_CONFIGS["llama"], 1, torch.float32, "sdpa") / (ROWS * LENGTH) - layer_bytes_per_token(
        card, one
    )
    # Measured without the loss, so without hidden states and their gradient; with the rotary tables all rows share.
    assert measured <= ends_bytes_per_token(card, one) + 2 * 4 * card.head_dim
