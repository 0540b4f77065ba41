"""Random initialisation: the model's own distribution, the same rows whoever draws them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, initialization

from coremill.errors import InputError
from coremill.model.build import build_on_meta
from coremill.model.initialise import InitialOperation, initialise, record_initialisation
from coremill.model.load import fill_parameters
from coremill.model.slices import RowSlice, materialise, rows_of_rank
from coremill.model.source import ModelFolder
from coremill.plan.card import read_card
from tiny_models import FAMILIES, MERGED_FAMILIES, make_config_folder

WIDER = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}


def source_of(folder: Path) -> ModelFolder:
    return ModelFolder(
        folder, json.loads((folder / "config.json").read_text()), "random", "the model", "AutoModelForCausalLM"
    )


@pytest.mark.parametrize("family", [*FAMILIES, *MERGED_FAMILIES])
def test_distribution_is_the_models_own(tmp_path: Path, family: str) -> None:
    changes = {"n_embd": 96} if family == "gpt2" else WIDER
    source = source_of(make_config_folder(tmp_path, family, **changes))
    model = build_on_meta(source)
    materialise(model)
    report = fill_parameters(model, source, rank=0, world_size=1, seed=5)
    assert report.bytes_read == report.tensor_bytes == 0
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.folder), dtype=torch.float32)
    for name, expected in reference.named_parameters():
        drawn = model.get_parameter(name)
        if float(expected.std()) == 0:
            assert torch.equal(drawn, expected), name
        else:
            # A deviation estimated from n values is off by 1/sqrt(2n), a mean by 1/sqrt(n): allow six of the larger.
            allowed = 6 / drawn.numel() ** 0.5
            assert abs(float(drawn.std() / expected.std()) - 1) < allowed, name
            assert abs(float(drawn.mean())) < allowed * float(expected.std()), name


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Families that compute what they copy into a parameter where that lies, or of what was drawn for it.
COMPUTED = {
    "xlstm": {"embedding_dim": 32, "num_heads": 4, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "pad_token_id": 0},
    "mamba2": {"num_heads": 64, "head_dim": 1, "n_groups": 1},
    "qwen3_next": {"linear_num_value_heads": 64, "linear_num_key_heads": 2, "num_experts": 4, "head_dim": 8},
    "nemotron_h": {"head_dim": 8, "mamba_num_heads": 64, "mamba_head_dim": 1, "n_groups": 1, "ssm_state_size": 8},
}


@pytest.mark.parametrize("family", COMPUTED)
def test_values_that_a_module_computes_for_itself(tmp_path: Path, family: str) -> None:
    AutoConfig.for_model(family, **{**SMALL, **COMPUTED[family]}).save_pretrained(tmp_path)
    source = source_of(tmp_path)
    blueprint = build_on_meta(source)
    record = record_initialisation(blueprint)
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.folder), dtype=torch.float32)
    shapes = {name: tuple(each.shape) for name, each in blueprint.named_parameters()}
    with pytest.raises(InputError, match="cannot be told from its config alone"):
        read_card(tmp_path, pretrained=False)
    expected.save_pretrained(tmp_path)  # the plan then counts the tensors, whatever is in them
    assert read_card(tmp_path, pretrained=False).parameters == read_card(tmp_path).parameters
    copied = [name for name, operations in record.items() if any(one.function == "copy_" for one in operations)]
    assert any(name.endswith(("A_log", "igate_preact.bias")) for name in copied)
    for name in copied:
        one = drawn(name, shapes[name], record, seed=1, size=1)
        assert torch.equal(drawn(name, shapes[name], record, seed=1, size=3), one), name
        own = expected.get_parameter(name).detach()
        assert one.isfinite().all() and float(one.std()) == pytest.approx(float(own.std()), rel=0.6), name
        assert float(one.mean()) == pytest.approx(float(own.mean()), abs=3 * float(own.std())), name
    again = record_initialisation(build_on_meta(source))
    for name in copied:
        assert torch.equal(
            drawn(name, shapes[name], again, seed=1, size=1), drawn(name, shapes[name], record, seed=1, size=1)
        )


def test_scaled_residual_projections(tmp_path: Path) -> None:
    record = record_initialisation(build_on_meta(source_of(make_config_folder(tmp_path, "gpt2", n_layer=8))))
    assert record["transformer.h.0.attn.c_proj.weight"][-1].arguments["std"] == pytest.approx(0.02 / 4)
    assert record["transformer.h.0.attn.c_attn.weight"][-1].arguments["std"] == pytest.approx(0.02)


def test_padding_row_is_zero_whoever_holds_it(tmp_path: Path) -> None:
    source = source_of(make_config_folder(tmp_path, "llama", pad_token_id=100))
    record = record_initialisation(build_on_meta(source))
    name = "model.embed_tokens.weight"
    assert [operation.function for operation in record[name]] == ["normal_", "constant_"]
    whole = drawn(name, (131, 24), record, seed=1, size=1)
    assert not whole[100].any() and whole[99].all() and whole[101].all()
    assert torch.equal(drawn(name, (131, 24), record, seed=1, size=3), whole)


def drawn(
    name: str, shape: tuple[int, ...], record: dict, *, seed: int, size: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The parameter as that many ranks draw it, put together."""
    parts = []
    for rank in range(size):
        start, stop = rows_of_rank(shape[0], rank, size)
        local = torch.full((stop - start, *shape[1:]), float("nan"), dtype=dtype)
        initialise(RowSlice(name, shape, start, stop, local), record, seed)
        parts.append(local)
    return torch.cat(parts)


def operation(function: str, arguments: dict, shape: tuple[int, ...]) -> InitialOperation:
    stride = torch.empty(shape, device="meta").stride()
    return InitialOperation(function, arguments, 0, shape, stride, (0, shape[0]))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("normal_", {"mean": 1.0, "std": 0.5}),
        ("uniform_", {"a": -2.0, "b": -1.0}),
        ("trunc_normal_", {"std": 0.02}),
        ("constant_", {"val": 3.0}),
        ("orthogonal_", {}),
        ("eye_", {}),
        ("copy_", {"other": torch.arange(13.0).expand(300, 13)}),
    ],
)
@pytest.mark.parametrize("size", [2, 3, 7, 128])
def test_any_number_of_ranks(function: str, arguments: dict, size: int) -> None:
    record = {"p": [operation(function, arguments, (300, 13))]}
    whole = drawn("p", (300, 13), record, seed=1, size=1)
    assert not whole.isnan().any()
    assert torch.equal(drawn("p", (300, 13), record, seed=1, size=size), whole)


@pytest.mark.parametrize("size", [1, 3])
def test_weights_held_in_bf16_are_those_of_fp32_rounded(size: int) -> None:
    record = {"p": [operation("normal_", {"std": 0.02}, (300, 13))]}
    whole = drawn("p", (300, 13), record, seed=1, size=1)
    assert torch.equal(drawn("p", (300, 13), record, seed=1, size=size, dtype=torch.bfloat16), whole.bfloat16())


def test_seed_name_and_block_all_matter() -> None:
    record = {name: [operation("normal_", {}, (128, 16))] for name in ("p", "q")}
    one = drawn("p", (128, 16), record, seed=1, size=1)
    assert not torch.equal(one, drawn("p", (128, 16), record, seed=2, size=1))
    assert not torch.equal(one, drawn("q", (128, 16), record, seed=1, size=1))
    assert not torch.equal(one[:64], one[64:])


def test_recorders_leave_nothing_behind(tmp_path: Path) -> None:
    before = initialization.normal_, nn.init.normal_, nn.Module.register_parameter
    record_initialisation(build_on_meta(source_of(make_config_folder(tmp_path, "llama"))))
    assert (initialization.normal_, nn.init.normal_, nn.Module.register_parameter) == before


def test_a_parameter_nobody_initialises() -> None:
    piece = RowSlice("p", (2, 2), 0, 2, torch.empty(2, 2))
    with pytest.raises(InputError, match="no random initialisation is known for parameter p"):
        initialise(piece, {}, 1)
