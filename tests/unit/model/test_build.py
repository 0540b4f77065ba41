"""Building on meta: parameters take no memory, buffers are right, the parts of every family are found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from coremill.errors import InputError
from coremill.model.build import attention_of, build_on_meta, find_layers
from coremill.model.slices import materialise
from coremill.model.source import ModelFolder
from tiny_models import FAMILIES, MERGED_FAMILIES, make_config_folder

ALL = [*FAMILIES, *MERGED_FAMILIES]


def source_of(folder: Path) -> ModelFolder:
    return ModelFolder(
        folder, json.loads((folder / "config.json").read_text()), "random", "the model", "AutoModelForCausalLM"
    )


@pytest.mark.parametrize("family", ALL)
def test_parameters_on_meta_and_buffers_right(tmp_path: Path, family: str) -> None:
    folder = make_config_folder(tmp_path, family)
    model = build_on_meta(source_of(folder))
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    shapes = {name: parameter.shape for name, parameter in reference.named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    buffers = dict(model.named_buffers())
    for name, buffer in reference.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert model.training
    assert model.config.use_cache is False

    materialise(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == reference.num_parameters()
    for name, buffer in reference.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name


@pytest.mark.parametrize("family", ALL)
def test_parts_are_found(tmp_path: Path, family: str) -> None:
    model = build_on_meta(source_of(make_config_folder(tmp_path, family)))
    parts = find_layers(model)
    assert len(parts.layers) == 2
    assert len({type(layer) for layer in parts.layers}) == 1
    assert parts.embedding is model.get_input_embeddings()
    assert parts.head is model.get_output_embeddings()
    assert parts.tied == (family in ("llama-tied", "qwen2", "gemma", "gemma2", "gpt2"))
    assert any("norm" in name or "ln_f" in name for name in parts.other)


def test_parts_that_are_not_there() -> None:
    with pytest.raises(InputError, match="cannot find the parts of Sequential"):
        find_layers(nn.Sequential(nn.Linear(2, 2)))


def test_attention_that_a_model_does_not_have(tmp_path: Path) -> None:
    capped = build_on_meta(source_of(make_config_folder(tmp_path / "capped", "gemma2")), attention="sdpa")
    choice = attention_of(capped, "sdpa")
    assert choice.value == "eager"
    assert "has no sdpa form" in choice.reason
    plain = build_on_meta(source_of(make_config_folder(tmp_path / "plain", "llama")), attention="sdpa")
    assert attention_of(plain, "sdpa").value == "sdpa"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "no-such-type"}, "cannot build a causal language model"),
        ({"model_type": "vit"}, "cannot build a causal language model"),
        ({"hidden_size": 25}, "is not a multiple of the number of attention heads"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantised and cannot be trained"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}, "set model.trust_remote_code: true"),
    ],
)
def test_configs_that_cannot_be_built(tmp_path: Path, changes: dict, expected: str) -> None:
    folder = make_config_folder(tmp_path, "llama", **changes)
    with pytest.raises(InputError) as caught:
        build_on_meta(source_of(folder))
    assert expected in str(caught.value)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    """Of a model that transformers knows as well: its own classes serve."""
    folder, canary = make_config_folder(tmp_path / "model", "llama"), tmp_path / "canary"
    for name in ("configuration_own", "modeling_own"):
        (folder / f"{name}.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    assert type(build_on_meta(source_of(folder))).__name__ == "LlamaForCausalLM"
    assert not canary.exists()


def test_without_words_to_predict_the_head_is_what_stands_behind_the_trunk(tmp_path: Path) -> None:
    source = replace(source_of(make_config_folder(tmp_path, "llama")), model_class="AutoModelForSequenceClassification")
    model = build_on_meta(source)
    parts = find_layers(model)
    assert parts.head is model.score and not parts.tied and parts.layers_name == "model.layers"
    with pytest.raises(InputError, match="no output head"):
        find_layers(model.model)
