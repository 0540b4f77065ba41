"""Export, one rank: files and index, dtype, what lies beside the weights, and a folder that is whole or not there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coremill.checkpoint.export import export_model
from coremill.config.schema import ModelSection, RunConfig
from coremill.errors import StorageError
from coremill.model.build import build_on_meta
from coremill.model.load import fill_parameters
from coremill.model.slices import materialise
from coremill.model.source import ModelFolder, resolve_model
from coremill.plan.headers import read_headers
from coremill.tasks.causal_lm import CausalLm
from tiny_models import make_model, make_tokenizer


@dataclasses.dataclass
class Alone:
    rank: int = 0
    size: int = 1

    def barrier(self) -> None:
        pass


def loaded(folder: Path, **section: str) -> tuple[PreTrainedModel, ModelFolder]:
    source = resolve_model(ModelSection(name=str(folder), **section), CausalLm(RunConfig()), cache=folder / "cache")
    model = build_on_meta(source)
    materialise(model)
    fill_parameters(model, source, rank=0, world_size=1, seed=1)
    return model.eval(), source


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(20).view(2, 10)).logits


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt_neox", "mixtral"])
def test_several_files_and_an_index(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coremill.checkpoint.export_folder.MAX_FILE_BYTES", 30_000)
    folder = make_model(tmp_path / "m", family)
    model, source = loaded(folder)
    report = export_model(model, source, None, tmp_path / "out", world=Alone())
    assert len(report.files) > 1
    assert report.files[0] == f"model-00001-of-{len(report.files):05}.safetensors"
    assert report.bytes == sum(header.bytes for header in read_headers(report.folder).values())
    assert set(read_headers(report.folder)) == set(read_headers(folder))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(report.folder).eval()), logits(model))


def test_random_weights_export_like_save_pretrained(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "gpt_neox")
    model, source = loaded(folder, weights="random")
    report = export_model(model, source, None, tmp_path / "out", world=Alone())
    model.save_pretrained(tmp_path / "theirs")
    assert set(read_headers(report.folder)) == set(read_headers(tmp_path / "theirs"))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(report.folder).eval()), logits(model))


def test_dtype_and_what_lies_beside(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama-tied")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    tokenizer = make_tokenizer(tmp_path / "t")
    (tokenizer / "config.json").write_text('{"model_type": "another"}')
    (tokenizer / "tokenizer.json").chmod(0o400)
    model, source = loaded(folder)
    report = export_model(model, source, tokenizer, tmp_path / "out", world=Alone(), dtype=torch.bfloat16)
    config = json.loads((report.folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config.get("use_cache", True)
    assert json.loads((report.folder / "generation_config.json").read_text())["temperature"] == 0.5
    assert (report.folder / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    assert {header.dtype for header in read_headers(report.folder).values()} == {"BF16"}
    again = AutoModelForCausalLM.from_pretrained(report.folder)
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.model.norm.weight, model.model.norm.weight.bfloat16())
    assert "lm_head.weight" not in read_headers(report.folder)


def test_a_second_export_replaces_the_first(tmp_path: Path) -> None:
    model, source = loaded(make_model(tmp_path / "m", "llama"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    export_model(model, source, None, tmp_path / "out", world=Alone())
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = loaded(make_model(tmp_path / "m", "llama"))

    def full_disk(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coremill.checkpoint.export_folder._header", full_disk)
    with pytest.raises(StorageError, match="cannot write the export: No space left on device"):
        export_model(model, source, None, tmp_path / "out", world=Alone())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
