"""Whether a run can go on from an adapter folder, told without torch; and which base a run has."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from coremill.config.places import find_places, with_paths
from coremill.config.schema import LoraSection, RunConfig
from coremill.errors import InputError
from coremill.model import adapter_source
from coremill.model.adapter_source import _refuse_another_base, find_adapter, refuse_unfit_adapter
from coremill.model.lora_base import (
    Base,
    base_folder_of,
    base_of,
    digest_of_model,
    refuse_changed_base,
    require_peft,
)
from coremill.model.source import ModelFolder
from coremill.plan.adapter_folder import base_named_by, refuse_other_adapter, words_of_another_base
from coremill.plan.adapters import adapted_by
from coremill.plan.config_file import read_config
from coremill.plan.trained import NamedParameter

PARAMETERS = [
    NamedParameter(("model.embed_tokens.weight", "lm_head.weight"), (11, 6), True),
    NamedParameter(("model.layers.0.up.weight",), (10, 6), True),
    NamedParameter(("model.layers.0.down.weight",), (6, 10), True),
]
A, B = "base_model.model.model.layers.0.{}.lora_A.weight", "base_model.model.model.layers.0.{}.lora_B.weight"
SHAPES = {A.format("up"): (2, 6), B.format("up"): (10, 2), A.format("down"): (2, 10), B.format("down"): (6, 2)}


def write_adapter(folder: Path, shapes: dict[str, tuple[int, ...]] = SHAPES, **changes: Any) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "/models/one", **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def look(folder: Path, **lora: Any) -> None:
    section = LoraSection.model_validate({"rank": 2, **lora})
    refuse_other_adapter(folder, section, adapted_by(PARAMETERS, section))


def test_an_adapter_that_fits_is_taken(tmp_path: Path) -> None:
    look(write_adapter(tmp_path / "a"))
    # A table with two names may lie under one of them or both; weights that are turned have turned shapes.
    tables = {"base_model.model.model.embed_tokens.weight": (11, 6), "base_model.model.lm_head.weight": (11, 6)}
    look(write_adapter(tmp_path / "b", {**SHAPES, **tables}), modules_to_save=["lm_head"])
    turned = {A.format("up"): (2, 10), B.format("up"): (6, 2), A.format("down"): (2, 6), B.format("down"): (10, 2)}
    look(write_adapter(tmp_path / "c", turned))


@pytest.mark.parametrize(
    ("changes", "lora", "said"),
    [
        ({"r": 16}, {}, "has r 16, the run file lora.rank 2.*set lora.rank: 16"),
        ({"lora_alpha": 32}, {}, "lora_alpha 32, the run file lora.alpha 4.*set lora.alpha: 32"),
        ({"peft_type": "IA3"}, {}, "no LoRA adapter but IA3"),
        ({"use_dora": True}, {}, "uses use_dora"),
        ({"shapes": {}}, {}, "another model or form.*is not in it.*made for /models/one"),
        ({"shapes": {**SHAPES, A.format("up"): (2, 7)}}, {}, r"layers.0.up has shape \[10, 7\].*wants \[10, 6\]"),
        ({}, {"target_modules": ["up"]}, "2 tensors that this run does not train"),
        ({}, {"modules_to_save": ["lm_head"]}, "embed_tokens.weight is not in it"),
    ],
)
def test_another_one_is_refused(tmp_path: Path, changes: dict[str, Any], lora: dict[str, Any], said: str) -> None:
    folder = write_adapter(tmp_path / "a", **changes)
    with pytest.raises(InputError) as refused:
        look(folder, **lora)
    assert re.search(said, str(refused.value), re.DOTALL), str(refused.value)
    assert "lora.start_from" in str(refused.value)


def test_what_is_no_adapter_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no adapter_config.json"):
        look(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="name it in model"):
        look(tmp_path)
    pickled = write_adapter(tmp_path / "a")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(InputError, match="pickled"):
        look(pickled)


def test_a_base_of_another_name_is_a_warning(tmp_path: Path) -> None:
    """Of which nothing else is known."""
    folder = write_adapter(tmp_path / "a")
    assert base_named_by(folder, "/models/one/") is None
    assert base_named_by(folder, "/models/two") == "/models/one"
    words = words_of_another_base(folder, "/models/one", "/models/two")
    assert "made for /models/one, and goes on beside /models/two" in words


def _model(folder: Path, value: float, **config: float) -> ModelFolder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file({"w": np.full(5, value, np.float32)}, folder / "model.safetensors")
    return ModelFolder(folder, read_config(folder), "pretrained", "m", "AutoModelForCausalLM")


def test_an_adapter_of_other_weights_is_refused(tmp_path: Path) -> None:
    ours = _model(tmp_path / "ours", 1.0)
    same, other = _model(tmp_path / "same", 1.0), _model(tmp_path / "other", 2.0)
    here, hub = Base(str(ours.folder), None, digest_of_model(ours)), Base("me/it", None, digest_of_model(ours))
    _refuse_another_base(tmp_path, str(same.folder), here, ours)
    _refuse_another_base(tmp_path, "/nowhere", here, ours)  # a warning
    with pytest.raises(InputError, match="different weights"):
        _refuse_another_base(tmp_path, str(other.folder), here, ours)
    with pytest.raises(InputError, match="two models on the hub"):
        _refuse_another_base(tmp_path, "me/it-instruct", hub, ours)


def test_a_base_is_its_config_and_every_tensor(tmp_path: Path) -> None:
    model = _model(tmp_path / "m", 1.0, rope_theta=1e4)
    base = Base("m", None, digest_of_model(model))
    refuse_changed_base(base, model)
    for changed in (_model(tmp_path / "m", 1.0, rope_theta=5e5), _model(tmp_path / "m", 2.0, rope_theta=1e4)):
        with pytest.raises(InputError, match="have changed while the run went on"):
            refuse_changed_base(base, changed)


def test_an_adapter_that_took_from_its_base_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", init_lora_weights="pissa")
    with pytest.raises(InputError, match="began as pissa"):
        look(folder)


def test_what_a_run_has_for_its_base(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": np.ones(5, np.float32)}, file)
    config = RunConfig.model_validate({"model": str(tmp_path), "lora": {"rank": 2}})
    model = ModelFolder(tmp_path, {}, "pretrained", "m", "AutoModelForCausalLM")
    base = base_of(config, model)
    assert base is not None and (base.name, base.revision) == (str(tmp_path), None) and not base.is_on_hub
    assert base_of(config, model) == base
    save_file({"w": np.zeros(5, np.float32)}, file)
    changed = base_of(config, model)
    assert changed is not None and changed.digest != base.digest
    assert base_of(RunConfig.model_validate({"model": str(tmp_path)}), model) is None
    commit = "0123456789abcdef0123456789abcdef01234567"
    (tmp_path / commit).mkdir()
    file.rename(tmp_path / commit / file.name)
    of_hub = ModelFolder(tmp_path / commit, {}, "pretrained", "me/it", "AutoModelForCausalLM")
    named = RunConfig.model_validate({"model": "me/it", "lora": {"rank": 2}})
    assert base_of(named, of_hub) == Base("me/it", commit, changed.digest)


def test_where_a_base_lies(tmp_path: Path) -> None:
    assert base_folder_of(tmp_path) is None
    assert base_folder_of(write_adapter(tmp_path / "a")) == Path("/models/one")


def test_peft_is_asked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_peft(RunConfig())
    with pytest.raises(InputError, match=r"pip install 'coremill\[lora\]'"):
        require_peft(RunConfig.model_validate({"lora": {"rank": 2}}))


def test_a_path_beside_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    write_adapter(tmp_path / "project" / "a")
    monkeypatch.chdir(tmp_path)
    config = RunConfig.model_validate({"lora": {"rank": 2, "start_from": "a"}})
    places = find_places(config, Path("project/run.yaml"))
    assert places.paths == {"lora.start_from": "project/a"} and "lora.start_from: a is not in" in places.notes[0]
    assert with_paths(config, places.paths).lora.start_from == "project/a"


def test_a_plan_refuses_the_adapter_that_a_run_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_source, "parameters_of", lambda *_, **__: PARAMETERS)
    model, said = _model(tmp_path / "m", 1.0), list[str]()

    def look_at(folder: Path, *, goes_on: bool = False) -> None:
        lora = {"rank": 2, "start_from": str(folder)}
        config = RunConfig.model_validate({"model": str(model.folder), "lora": lora})
        refuse_unfit_adapter(config, model, tmp_path)
        base = base_of(config, model)
        assert find_adapter(config, model, base, tmp_path, said.append, goes_on=goes_on) == folder

    good = write_adapter(tmp_path / "good", base_model_name_or_path=str(model.folder))
    look_at(good, goes_on=True)
    assert not said
    look_at(good)
    assert said == [f"begins with the adapter in {good}, not with a new one"]
    other = str(_model(tmp_path / "other", 2.0).folder)
    for folder, words in (
        (tmp_path / "gone", "no such adapter folder"),
        (model.folder, "no adapter_config.json"),
        (write_adapter(tmp_path / "wide", r=16), "has r 16, the run file lora.rank 2"),
        (write_adapter(tmp_path / "foreign", base_model_name_or_path=other), "different weights"),
    ):
        with pytest.raises(InputError, match=words):
            look_at(folder)
