"""Where a model comes from: folders, the built-in shape, inline configs; each bad input with its message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coremill.config.schema import ModelSection, RunConfig
from coremill.errors import InputError
from coremill.model.source import BUILT_IN_CONFIG, ModelFolder, resolve_model, resolve_tokenizer
from coremill.remote_code import is_folder
from coremill.tasks.causal_lm import CausalLm
from tiny_models import make_config_folder, tiny_config


def refusal(section: ModelSection, cache: Path) -> str:
    with pytest.raises(InputError) as caught:
        resolve_model(section, CausalLm(RunConfig()), cache=cache)
    return str(caught.value)


def test_built_in(tmp_path: Path) -> None:
    model = resolve_model(ModelSection(), CausalLm(RunConfig()), cache=tmp_path)
    assert model.weights == "random"
    assert model.config == BUILT_IN_CONFIG
    assert json.loads((model.folder / "config.json").read_text()) == BUILT_IN_CONFIG
    assert resolve_model(ModelSection(), CausalLm(RunConfig()), cache=tmp_path) == model


def test_inline_config(tmp_path: Path) -> None:
    one = resolve_model(ModelSection(config=tiny_config("llama")), CausalLm(RunConfig()), cache=tmp_path)
    other = resolve_model(ModelSection(config=tiny_config("gpt2")), CausalLm(RunConfig()), cache=tmp_path)
    assert one.weights == other.weights == "random"
    assert one.folder != other.folder
    assert one.config == tiny_config("llama")
    assert "model.config has no model_type" in refusal(ModelSection(config={"hidden_size": 8}), tmp_path)


def test_folder_from_scratch_needs_no_weights(tmp_path: Path) -> None:
    folder = make_config_folder(tmp_path / "m", "llama")
    assert (
        resolve_model(ModelSection(name=str(folder), weights="random"), CausalLm(RunConfig()), cache=tmp_path).weights
        == "random"
    )
    message = refusal(ModelSection(name=str(folder)), tmp_path)
    assert "no weights in the model folder" in message
    assert "model.weights=random" in message


def test_bad_folders(tmp_path: Path) -> None:
    assert "no such model folder" in refusal(ModelSection(name=str(tmp_path / "absent")), tmp_path)
    folder = tmp_path / "m"
    folder.mkdir()
    assert "no config.json in the model folder" in refusal(ModelSection(name=str(folder)), tmp_path)
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(ModelSection(name=str(folder)), tmp_path)
    (folder / "config.json").write_text("{}")
    assert "config.json has no model_type" in refusal(ModelSection(name=str(folder)), tmp_path)
    (folder / "config.json").write_text(json.dumps(tiny_config("llama")))
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    assert "only a pickle checkpoint" in refusal(ModelSection(name=str(folder)), tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    assert "model.safetensors is damaged" in refusal(ModelSection(name=str(folder)), tmp_path)


def test_what_means_a_folder(tmp_path: Path) -> None:
    assert is_folder(str(tmp_path)) and is_folder("./absent") and is_folder("/absent") and is_folder("a/b/c")
    assert not is_folder("owner/name") and not is_folder("gpt2")


def test_tokenizer_of_the_model_or_named(tmp_path: Path) -> None:
    folder = make_config_folder(tmp_path / "m", "llama")
    model = ModelFolder(folder, tiny_config("llama"), "random", "m", "AutoModelForCausalLM")
    config = RunConfig.model_validate({"model": {"name": str(folder), "weights": "random"}})
    with pytest.raises(InputError, match="has no tokenizer of its own"):
        resolve_tokenizer(config, model, cache=tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer(config, model, cache=tmp_path) == folder

    named = RunConfig.model_validate({"model": str(folder), "tokenizer": str(tmp_path / "other")})
    with pytest.raises(InputError, match="no tokenizer in"):
        resolve_tokenizer(named, model, cache=tmp_path)


def test_sources_need_no_torch() -> None:
    program = "import sys, coremill.model.source; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
