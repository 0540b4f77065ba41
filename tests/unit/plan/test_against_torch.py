"""Counts and kept activations of every known family, held to the real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coremill.config.schema import LoraSection
from coremill.model.fused_layers import fuse_layers
from coremill.model.lora import add_adapters, fuse_adapters
from coremill.model.parameter_list import named_parameters
from coremill.model.quick_dropout import quicken_dropout
from coremill.model.trained import freeze
from coremill.plan.activations import ends_bytes_per_token, layer_bytes_per_token
from coremill.plan.activations import kept_bytes as planned_bytes
from coremill.plan.adapters import adapted_by, means, modules_of, with_adapters
from coremill.plan.attention import EAGER_ONLY
from coremill.plan.card import as_written, read_card
from coremill.plan.headers import TensorHeader
from coremill.plan.trained import NamedParameter, frozen_by, is_named, with_frozen
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
        optimizer="adamw",
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
    values: dict[str, Any],
    layers: int,
    dtype: torch.dtype,
    attention: str,
    *,
    documents_apart: bool = False,
    fused: bool = True,
    frozen: tuple[str, ...] = (),
    lora: LoraSection | None = None,
) -> int:
    """What autograd really keeps of one forward pass of the base model, parameters aside."""
    values = with_layers(values, layers)
    model = AutoModelForCausalLM.from_config(config_of(values), attn_implementation=attention).to(dtype).train()
    freeze(model, frozen)
    if lora is not None:
        add_adapters(model, lora)
        model.to_empty(device="cpu")  # peft left adapters on meta
        torch.nn.init.zeros_(model.get_input_embeddings().weight)
    if fused:
        fuse_layers(model)
        quicken_dropout(model)
        if lora is not None:
            fuse_adapters(model)
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_as_transformers_wrote_it_a_layer_keeps_no_more_than_the_plan_says(name: str, dtype: str) -> None:
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    two, first = (kept_bytes(TINY_CONFIGS[name], layers, torch_dtype, "eager", fused=False) for layers in (2, 1))
    planned = planned_layer(name, arrangement(dtype, "eager"), fused=False)
    assert 0.995 * (two - first) <= planned <= 1.15 * (two - first)


def planned_layer(name: str, one: Arrangement, *, fused: bool = True) -> int:
    """What the plan has for the second layer."""
    two, first = (read_card(config=with_layers(TINY_CONFIGS[name], layers)) for layers in (2, 1))
    if not fused:
        two, first = as_written(two), as_written(first)
    return planned_bytes(two, one) - planned_bytes(first, one)


LOWER = ("*embed*", "*.wte.*", "*.wpe.*", "*layers.0.*", "*.h.0.*")
UPPER = ("*layers.1.*", "*.h.1.*")


def those_of(name: str, patterns: tuple[str, ...]) -> tuple[list[NamedParameter], tuple[str, ...]]:
    """The parameters of two layers, and the patterns that mean some in this family."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(with_layers(TINY_CONFIGS[name], 2)))
    parameters = named_parameters(model)
    return parameters, tuple(one for one in patterns if any(is_named(each.names, [one]) for each in parameters))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_what_is_frozen_keeps_what_the_plan_says(name: str, attention: str) -> None:
    """Below all that is trained nothing; above something trained no more than other layers."""
    if name in SDPA_REFUSED and attention == "sdpa":
        pytest.skip("transformers refuses")
    values, one = TINY_CONFIGS[name], arrangement("fp32", attention)
    first = kept_bytes(values, 1, torch.float32, attention)
    two, alone = (read_card(config=with_layers(values, layers)) for layers in (2, 1))
    for patterns in (UPPER, LOWER):
        parameters, meant = those_of(name, patterns)
        card = with_frozen(two, frozen_by(parameters, meant))
        measured = kept_bytes(values, 2, torch.float32, attention, frozen=meant) - first
        planned = planned_bytes(card, one) - planned_bytes(alone, one)
        assert measured <= planned + 0.005 * first, patterns
        assert patterns is UPPER or planned <= measured + 0.03 * first


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


def test_families_without_sdpa_are_those_of_transformers() -> None:
    found = set()
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]]
        if not getattr(model, "_supports_sdpa", False):
            found.add(family)
    assert found == EAGER_ONLY


@pytest.mark.parametrize(
    ("family", "window"),
    [("mistral", 4096), ("gemma2", 4096), ("qwen2", 4096), ("qwen3_moe", 4096), ("llama", None)]
    + [("gemma3_text", 4096), ("olmo3", 4096), ("smollm3", None)],
)
def test_windows_are_those_of_transformers(family: str, window: int | None) -> None:
    config = CONFIG_MAPPING[family]()
    types = getattr(config, "layer_types", None) or (
        ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
        * config.num_hidden_layers
    )
    expected = tuple(window if kind == "sliding_attention" else None for kind in types)
    assert read_card(config={"model_type": family}).windows == expected
    # What a saved config says is the same.
    assert read_card(config=config.to_dict()).windows == expected


@pytest.mark.parametrize("family", ["stablelm", "starcoder2", "bloom", "gpt_bigcode", "phimoe", "mamba"])
def test_layers_that_are_not_known_keep_no_more_than_the_plan_says(family: str) -> None:
    known = TINY_CONFIGS["mixtral" if family == "phimoe" else "llama"]
    values = {**known, "model_type": family, "num_key_value_heads": 4, "n_head": 4, "n_embd": 64, "n_inner": 176}
    if family == "mamba":
        values = {"model_type": family, "hidden_size": 64, "state_size": 8, "vocab_size": 250, "num_hidden_layers": 2}
    names = set(CONFIG_MAPPING[family]().to_dict()) | {"model_type"}
    values = {key: value for key, value in values.items() if key in names or key == "num_hidden_layers"}
    config = config_of(with_layers(values, 2))
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    headers = {name: TensorHeader(name, "F32", tuple(one.shape), "one", 0, 0) for name, one in parameters.items()}
    card = read_card(config=config.to_dict(), headers=headers)
    assert card.parameters == sum(one.numel() for one in parameters.values())
    assert card.estimated_numbers is not None and card.layers == 2
    attention = "eager" if family in EAGER_ONLY else "sdpa"
    measured = kept_bytes(values, 2, torch.float32, attention)
    assert 1 < planned_bytes(card, arrangement("fp32", "sdpa")) / measured < 2


ADAPTED = {
    "all": {"rank": 4},
    "attention only": {"rank": 4, "target_modules": ["q_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"]},
    "mlp only": {"rank": 4, "target_modules": ["down_proj", "mlp.c_proj", "dense_4h_to_h", "fc2"]},
    "dropout": {"rank": 4, "dropout": 0.1},
}


@pytest.mark.parametrize("which", ADAPTED)
@pytest.mark.parametrize(
    "name", ["llama", "olmo2", "qwen3", "gemma3_text", "phi3", "gpt2-no-dropout", "gpt_neox", "phi"]
)
def test_layers_with_adapters_keep_what_the_plan_says(name: str, which: str) -> None:
    """Inputs of maps that have no gradient are not kept, the narrow products of the others are."""
    values, one = TINY_CONFIGS[name], arrangement("fp32", "sdpa")
    parameters, _ = those_of(name, ())
    wanted = ADAPTED[which].get("target_modules")
    meant = wanted and [each for each in wanted if any(means(each, module) for module in modules_of(parameters))]
    lora = LoraSection.model_validate({**ADAPTED[which], "target_modules": meant})
    two, first = (kept_bytes(values, layers, torch.float32, "sdpa", lora=lora) for layers in (3, 2))
    planned = [_planned_with_adapters(values, layers, lora, one) for layers in (3, 2)]
    assert 0.995 * (two - first) <= planned[0] - planned[1] <= 1.06 * (two - first)


def _planned_with_adapters(values: dict[str, Any], layers: int, lora: LoraSection, one: Arrangement) -> int:
    values = with_layers(values, layers)
    with torch.device("meta"):
        parameters = named_parameters(AutoModelForCausalLM.from_config(config_of(values)))
    return planned_bytes(with_adapters(read_card(config=values), parameters, adapted_by(parameters, lora)), one)
