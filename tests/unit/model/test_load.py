"""Loading from files, one rank: dtypes, names, ties, and files that do not belong to the config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from coremill.config.schema import ModelSection, RunConfig
from coremill.errors import InputError
from coremill.model.build import build_on_meta
from coremill.model.load import LoadReport, fill_parameters
from coremill.model.slices import materialise, rows_of_rank
from coremill.model.source import resolve_model
from coremill.tasks.causal_lm import CausalLm
from tiny_models import make_model


def load(folder: Path) -> tuple[PreTrainedModel, LoadReport]:
    source = resolve_model(ModelSection(name=str(folder)), CausalLm(RunConfig()), cache=folder / "cache")
    model = build_on_meta(source)
    materialise(model)
    return model, fill_parameters(model, source, rank=0, world_size=1, seed=1)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load(folder)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_stored_dtypes_are_cast_on_the_way_in(tmp_path: Path, dtype: str) -> None:
    folder = make_model(tmp_path / "m", "llama", dtype=dtype)
    model, report = load(folder)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored[name].float()), name
    assert report.bytes_read == report.tensor_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_pieces_smaller_than_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coremill.model.read.PIECE_BYTES", 64)
    folder = make_model(tmp_path / "m", "llama", dtype="bfloat16")
    model, _ = load(folder)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(parameter, stored[name].float()) for name, parameter in model.named_parameters())


def test_base_model_checkpoint_gets_a_new_head(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")

    def to_base_model(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change(folder, to_base_model)
    model, report = load(folder)
    assert report.initialised == ("lm_head.weight",)
    assert torch.equal(model.model.norm.weight, load_file(folder / "model.safetensors")["norm.weight"])
    assert 0.01 < float(model.lm_head.weight.std()) < 0.03


def test_head_stored_beside_a_tied_embedding(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama-tied")
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    model, report = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert report.bytes_read == report.tensor_bytes
    change(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    message = refusal(folder)
    assert "lm_head.weight is tied to model.embed_tokens.weight by the config" in message
    assert '"tie_word_embeddings": false' in message


def test_tied_weight_stored_under_the_head_only(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama-tied")
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    model, report = load(folder)
    assert report.initialised == ()
    assert torch.equal(model.model.embed_tokens.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


def test_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    change(folder, lambda tensors: tensors.update({"extra.weight": torch.zeros(3)}))
    _, report = load(folder)
    assert report.unexpected == ("extra.weight",)
    assert report.bytes_read == report.tensor_bytes


def test_old_buffers_in_files_are_no_news(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    change(folder, lambda tensors: tensors.update(old))
    _, report = load(folder)
    assert report.unexpected == ()


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1.mlp" in name] and None)
    assert "the weights lack 3 parameters of the model: model.layers.1.mlp" in refusal(folder)


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 140}))
    message = refusal(folder)
    assert "has shape [131, 24] in the file, the model wants [140, 24]" in message
    assert "config.json does not belong to these weights" in message


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    assert "is stored as I8" in refusal(folder)
    change(folder, lambda tensors: tensors.update({name: torch.zeros(50, 24).to(torch.float8_e4m3fn)}))
    assert "is stored as F8_E4M3" in refusal(folder)


def test_old_names_are_understood(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "gpt2")
    expected = AutoModelForCausalLM.from_pretrained(folder)

    def to_old_names(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # a mask, as the first releases stored it

    change(folder, to_old_names)
    model, report = load(folder)
    assert report.initialised == ()
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize(("rows", "size"), [(131, 4), (5, 4), (1, 3), (8, 4), (0, 2)])
def test_rows_follow_the_rule_of_torch(rows: int, size: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(size)] if rows else []
    expected = chunks + [0] * (size - len(chunks))
    ranges = [rows_of_rank(rows, rank, size) for rank in range(size)]
    assert [stop - start for start, stop in ranges] == expected
    assert sum(stop - start for start, stop in ranges) == rows
