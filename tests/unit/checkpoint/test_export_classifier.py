"""A classifier with adapters: its own classes, a pooler that the files lack; loaded by the lines that are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_export_adapter import Run
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

from coremill.config.schema import RunConfig
from coremill.model.build import build_on_meta
from coremill.model.load import fill_parameters
from coremill.model.parameter_list import parameters_of
from coremill.model.slices import materialise
from coremill.model.source import ModelFolder
from coremill.model.trained import choose_trained
from coremill.plan.adapters import adapted_by
from coremill.plan.trained import frozen_by
from coremill.report.metrics import loading_expression, loading_lines
from coremill.tasks.encoder.sample import load_export
from tiny_encoders import make_encoder

NAMES = ("no", "perhaps", "yes")
CLASS = "AutoModelForSequenceClassification"
POOLER = ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
HEAD = ["classifier.weight", "classifier.bias"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """BERT that fills in words, without a pooler; and with a head of two classes."""
    folder, found = tmp_path_factory.mktemp("bases"), {}
    for name, made in (("words", AutoModelForMaskedLM), ("two", AutoModelForSequenceClassification)):
        found[name] = make_encoder(folder / name)
        torch.manual_seed(1)
        made.from_config(AutoConfig.from_pretrained(found[name])).save_pretrained(found[name])
    return found


def source_of(folder: Path) -> ModelFolder:
    config = json.loads((folder / "config.json").read_text())
    names = {
        "id2label": {str(at): name for at, name in enumerate(NAMES)},
        "problem_type": "single_label_classification",
    }
    changes = {**names, "label2id": {name: at for at, name in enumerate(NAMES)}}
    return ModelFolder(folder, config, "pretrained", str(folder), CLASS, config_changes=changes)


def trained(folder: Path, **sections: Any) -> tuple[Run, list[str]]:
    """A run of random steps, and what it trains beside adapters."""
    named = {"model": {"name": str(folder)}, "task": "sequence-classification", "data": {"source": "x.jsonl"}}
    config, source = RunConfig.model_validate({**named, **sections}), source_of(folder)
    model = build_on_meta(source)
    choose_trained(model, config, source)
    materialise(model)
    fill_parameters(model, source, rank=0, world_size=1, seed=config.train.seed, lora=config.lora)
    generator = torch.Generator().manual_seed(5)
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return Run(model.eval(), source, config), [name for name in names if "lora" not in name]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(5, 25).view(2, 10)).logits.float()


def test_what_the_files_lack_is_trained_whole_and_planned(bases: dict[str, Path], tmp_path: Path) -> None:
    assert trained(bases["words"], lora={"rank": 2})[1] == POOLER + HEAD
    assert trained(bases["words"], train={"freeze": ["*"]})[1] == POOLER + HEAD
    assert trained(bases["two"], lora={"rank": 2})[1] == HEAD
    listed = parameters_of(source_of(bases["words"]), tmp_path)
    lora = RunConfig.model_validate({"lora": {"rank": 2}}).lora
    assert [each.names[0] for each in adapted_by(listed, lora).whole] == POOLER + HEAD
    frozen = {name for each in frozen_by(listed, ["*"]) for name in each.names}
    assert frozen.isdisjoint(POOLER + HEAD) and len(frozen) == len(listed) - 4


@pytest.mark.parametrize("base", ["words", "two"])
def test_the_lines_that_are_shown_load_it(bases: dict[str, Path], base: str, tmp_path: Path) -> None:
    run, _ = trained(bases[base], lora={"rank": 2})
    made = run.export(tmp_path / "adapter")
    assert made.form.value == "adapter" and not (made.folder / "config.json").exists()
    stored = load_file(made.folder / "adapter_model.safetensors")
    assert any("pooler" in name for name in stored) == (base == "words")
    shown: dict[str, Any] = {}
    exec("\n".join(loading_lines(CLASS, str(made.folder), str(bases[base]))), shown)
    theirs = shown["model"]
    assert theirs.config.id2label == dict(enumerate(NAMES)) and theirs.config.num_labels == 3
    assert (logits(theirs) - logits(run.model)).abs().max() < 1e-5
    line = eval(loading_expression(CLASS, str(made.folder), str(bases[base])), shown)
    assert (logits(line) - logits(run.model)).abs().max() < 1e-5
    sampled, _ = load_export(CLASS, str(run.export(tmp_path / "sampled", bases[base]).folder), None, len(NAMES))
    assert (logits(sampled) - logits(run.model)).abs().max() < 1e-5
    merged = AutoModelForSequenceClassification.from_pretrained(run.export(tmp_path / "merged", merged=True).folder)
    assert (logits(merged) - logits(run.model)).abs().max() < 1e-5 and merged.config.id2label == dict(enumerate(NAMES))
