from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.plan.card import read_card
from coremill.plan.headers import TensorHeader
from coremill.plan.planner import make_plan
from unit.plan.shapes import LLAMA_3_8B, TINY_CONFIGS, fleet, llama_tensors, safetensors_bytes


def headers_of(tensors: dict[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    return {
        name: TensorHeader(name=name, dtype="BF16", shape=shape, file="model.safetensors", start=0, end=2)
        for name, shape in tensors.items()
    }


def test_llama_3_8b_has_its_published_size() -> None:
    card = read_card(config=LLAMA_3_8B, name="Llama-3-8B")
    assert card.parameters == 8_030_261_248
    assert card.matmul_parameters == 8_030_261_248 - 128256 * 4096 - 65 * 4096  # no lookup, no norms
    assert (card.kv_heads, card.head_dim, card.tied, card.max_positions) == (8, 128, False, 8192)


def test_flops_are_six_per_matmul_parameter_and_causal_attention() -> None:
    card = read_card(config=LLAMA_3_8B)
    attention = 6 * 32 * 512 * 4096
    assert card.flops_per_token(512) == pytest.approx(6 * card.matmul_parameters + attention)
    assert card.flops_per_token(1024) - card.flops_per_token(512) == pytest.approx(attention)


def test_headers_and_config_agree_buffers_and_the_tied_copy_left_out() -> None:
    config = {**TINY_CONFIGS["llama"], "tie_word_embeddings": True}
    from_headers = read_card(config=config, headers=headers_of(llama_tensors(tied_copy=True)))
    from_config = read_card(config=config)
    assert from_headers.parameters == from_config.parameters
    assert from_headers.matmul_parameters == from_config.matmul_parameters
    assert from_headers.groups == from_config.groups
    assert from_headers.disk_dtype == "BF16"


def test_no_experts_may_be_written_as_none_of_them() -> None:
    config = {**TINY_CONFIGS["llama"], "num_local_experts": 0, "num_experts_per_tok": 0}
    assert replace(read_card(config=config), name="") == replace(read_card(config=TINY_CONFIGS["llama"]), name="")
    with pytest.raises(InputError, match="num_local_experts of the model config is -1, not a number, 0 or more"):
        read_card(config={**config, "num_local_experts": -1})


def test_windows_by_letters_and_in_forms_that_are_not_read() -> None:
    config = {**TINY_CONFIGS["mistral"], "num_hidden_layers": 6, "sliding_window": 16, "max_position_embeddings": 4096}
    card = read_card(config={**config, "sliding_window_pattern": "LLLG"})
    assert card.windows == (16, 16, 16, None, 16, None) and card.unread == ()  # the last one sees all
    for key, value in (("sliding_window", [16, 32]), ("sliding_window", "16"), ("sliding_window_pattern", "LxG")):
        card = read_card(config={**config, key: value})
        assert len(card.unread) == 1 and card.unread[0].startswith(f"{key} of the model config is ")
        assert key != "sliding_window" or card.windows == 6 * (None,)
        notes = make_plan(RunConfig(), fleet(), card).assumptions
        assert f"how far attention reaches: {card.unread[0]}" in notes


def test_an_unknown_family_is_counted_by_its_headers() -> None:
    config = {**TINY_CONFIGS["llama"], "model_type": "brandnew"}
    card = read_card(config=config, headers=headers_of(llama_tensors(tied_copy=True)))
    assert card.parameters == read_card(config=TINY_CONFIGS["llama"]).parameters
    with pytest.raises(InputError, match="brandnew"):
        read_card(config=config)


def test_of_experts_only_the_routed_ones_are_multiplied() -> None:
    config = {**TINY_CONFIGS["llama"], "model_type": "mixture", "num_local_experts": 4, "num_experts_per_tok": 1}
    tensors = llama_tensors(tied_copy=True)
    plain = read_card(config=config, headers=headers_of(tensors))
    tensors |= {f"model.layers.0.mlp.experts.{expert}.w1.weight": (176, 64) for expert in range(4)}
    mixed = read_card(config=config, headers=headers_of(tensors))
    assert mixed.parameters - plain.parameters == 4 * 176 * 64
    assert mixed.matmul_parameters - plain.matmul_parameters == 176 * 64


def test_a_folder_is_read_by_its_headers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["llama"]))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(llama_tensors(tied_copy=True)))
    card = read_card(tmp_path)
    assert card.parameters == read_card(config=TINY_CONFIGS["llama"]).parameters
    assert card.disk_bytes > 2 * card.parameters
    assert read_card(tmp_path, pretrained=False).disk_bytes == 0


@pytest.mark.parametrize("text", [None, "{", "[]", '{"model_type": "llama", "hidden_size": "big"}'])
def test_a_bad_config_is_one_clear_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError):
        read_card(tmp_path)


def test_planning_imports_no_torch() -> None:
    script = """
import json, sys
from coremill.config.schema import RunConfig
from coremill.hardware.instances import fleet_of
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan
plan = make_plan(RunConfig(), fleet_of("4xc7i.8xlarge"), read_card(config=json.loads(sys.argv[1])))
json.dumps(plan.to_json())
print(sorted({"torch", "transformers", "numpy", "huggingface_hub"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(LLAMA_3_8B)], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.strip() == "[]"
