"""What a run with adapters leaves: a folder that peft, AutoModel and pipeline load, or one that needs nobody else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

from coremill.checkpoint.export import ExportReport, export_trained
from coremill.checkpoint.export_adapter import AdapterExport, asked_of
from coremill.config.schema import ModelSection, RunConfig
from coremill.engines.update import row_slice
from coremill.hosts.fingerprint import digest_of_files
from coremill.model.build import build_on_meta
from coremill.model.load import fill_parameters
from coremill.model.lora import add_adapters
from coremill.model.lora_base import base_of
from coremill.model.slices import RowSlice, materialise
from coremill.model.source import ModelFolder, resolve_model
from coremill.plan.headers import read_headers
from coremill.tasks.causal_lm import CausalLm
from tiny_models import make_config_folder, make_model, make_tokenizer


@dataclasses.dataclass
class Alone:
    rank: int = 0
    size: int = 1

    def barrier(self) -> None:
        pass


@dataclasses.dataclass
class Trained:
    """As an engine, which has what is trained."""

    model: nn.Module

    def slices(self) -> list[RowSlice]:
        named = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
        return [row_slice(name, each, each.detach()) for name, each in named]


@dataclasses.dataclass
class Run:
    """A model with adapters that have learned something."""

    model: Any
    source: ModelFolder
    config: RunConfig

    def export(
        self, folder: Path, tokenizer: Path | None = None, *, end_ids: tuple[int, ...] = (), **changes: Any
    ) -> ExportReport:
        asked = asked_of(self.config, base_of(self.config, self.source))
        assert isinstance(asked, AdapterExport)
        wanted = dataclasses.replace(asked, **changes)
        places = (self.source, tokenizer, folder)
        return export_trained(Trained(self.model), self.model, wanted, *places, world=Alone(), end_ids=end_ids)


def trained_run(folder: Path, weights: str = "pretrained", **lora: Any) -> Run:
    config = RunConfig.model_validate({"model": {"name": str(folder), "weights": weights}, "lora": {"rank": 3, **lora}})
    source = resolve_model(config.model, CausalLm(config), cache=folder / "cache")
    assert isinstance(config.model, ModelSection)
    model = build_on_meta(source)
    add_adapters(model, config.lora)
    materialise(model)
    fill_parameters(model, source, rank=0, world_size=1, seed=config.train.seed, lora=config.lora)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return Run(model.eval(), source, config)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(20).view(2, 10)).logits.float()


FORMS = [
    ("llama", {}),
    ("llama", {"target_modules": ["model.layers.0.self_attn.q_proj", "*.mlp.down_proj"]}),
    ("llama", {"modules_to_save": ["lm_head", "model.norm"]}),
    ("llama-tied", {"modules_to_save": ["embed_tokens"]}),
    ("gpt2", {"alpha": 4}),
    ("gpt_neox", {"modules_to_save": ["layers.0"]}),
    ("mixtral", {}),
]


@pytest.mark.parametrize(("family", "lora"), FORMS)
def test_peft_loads_the_adapter_and_merges_to_the_same(tmp_path: Path, family: str, lora: dict[str, Any]) -> None:
    folder = make_model(tmp_path / "m", family)
    weights = sorted(folder.glob("*.safetensors"))
    before = digest_of_files(weights)
    run = trained_run(folder, **lora)
    made = run.export(tmp_path / "adapter")
    assert made.form.value == "adapter" and made.files == ("adapter_model.safetensors",)
    assert made.bytes == sum(tensor.nbytes for tensor in load_file(made.folder / "adapter_model.safetensors").values())
    ours = logits(run.model)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), made.folder)
    assert (logits(theirs) - ours).abs().max() < 1e-5
    assert (logits(AutoModelForCausalLM.from_pretrained(made.folder)) - ours).abs().max() < 1e-5
    merged = run.export(tmp_path / "merged", merged=True)
    assert merged.form.value == "merged"
    assert set(read_headers(merged.folder)) == set(read_headers(folder))
    reloaded = logits(AutoModelForCausalLM.from_pretrained(merged.folder))
    assert (reloaded - logits(theirs.merge_and_unload())).abs().max() < 1e-5
    assert (reloaded - ours).abs().max() < 1e-5
    assert (reloaded - logits(AutoModelForCausalLM.from_pretrained(folder))).abs().max() > 1e-3
    assert digest_of_files(weights) == before


def test_every_door_of_the_libraries(tmp_path: Path) -> None:
    folder = make_tokenizer(make_model(tmp_path / "m", "llama"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    run = trained_run(folder)
    made, merged = run.export(tmp_path / "a", folder), run.export(tmp_path / "b", folder, merged=True)
    for each in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        assert (logits(each.from_pretrained(made.folder)) - logits(run.model)).abs().max() < 1e-5
    words = []
    for each in (made, merged):
        assert AutoTokenizer.from_pretrained(each.folder).chat_template == "{{ messages }}"
        generate = pipeline("text-generation", model=str(each.folder))
        words.append(generate("mill", max_new_tokens=8, do_sample=False)[0]["generated_text"])
    assert (
        words[0]
        == words[1]
        != pipeline("text-generation", model=str(folder))("mill", max_new_tokens=8, do_sample=False)[0][
            "generated_text"
        ]
    )


def test_the_same_bytes_every_time_and_what_the_config_says(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    run = trained_run(folder, dropout=0.25, modules_to_save=["lm_head"])
    once, again = run.export(tmp_path / "once").folder, run.export(tmp_path / "again").folder
    assert [each.name for each in sorted(once.iterdir())] == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(each.read_bytes() == (again / each.name).read_bytes() for each in once.iterdir())
    config = json.loads((once / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 6, 0.25)
    assert config["base_model_name_or_path"] == str(folder) and config["inference_mode"]
    assert config["target_modules"] == sorted(config["target_modules"]) and config["modules_to_save"] == ["lm_head"]
    assert {tensor.dtype for tensor in load_file(once / "adapter_model.safetensors").values()} == {torch.float32}


def test_a_merged_model_has_the_dtypes_of_the_files_and_is_rounded_once(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama", dtype="bfloat16", indexed=True)
    run = trained_run(folder)
    merged = run.export(tmp_path / "merged", merged=True).folder
    assert {header.dtype for header in read_headers(merged).values()} == {"BF16"}
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    stored = {name: tensor for file in merged.glob("*.safetensors") for name, tensor in load_file(file).items()}
    layer = run.model.model.layers[1].mlp.up_proj
    delta = 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.equal(stored["model.layers.1.mlp.up_proj.weight"], (layer.base_layer.weight + delta).bfloat16())


def test_rows_are_made_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "m", "gpt2")
    run = trained_run(folder)
    whole = run.export(tmp_path / "whole", merged=True).folder
    monkeypatch.setattr("coremill.model.base_rows.EXPORT_PIECE_BYTES", 400)  # four rows
    pieces = run.export(tmp_path / "pieces", merged=True).folder
    ours, theirs = load_file(pieces / "model.safetensors"), load_file(whole / "model.safetensors")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6, rtol=0) for name in theirs)


def test_a_base_that_nobody_could_load_is_merged(tmp_path: Path) -> None:
    random = trained_run(make_config_folder(tmp_path / "random", "llama"), weights="random")
    made = random.export(tmp_path / "out")
    assert made.form.value == "merged" and "drawn at random" in made.form.reason
    assert (logits(AutoModelForCausalLM.from_pretrained(made.folder)) - logits(random.model)).abs().max() < 1e-5

    whole = make_model(tmp_path / "m", "llama")
    headless = tmp_path / "headless"
    AutoModelForCausalLM.from_pretrained(whole).model.save_pretrained(headless)
    shutil.copy(whole / "config.json", headless / "config.json")
    run = trained_run(headless)
    made = run.export(tmp_path / "with-head")
    assert made.form.value == "merged" and "lm_head.weight is in no file" in made.form.reason
    assert (logits(AutoModelForCausalLM.from_pretrained(made.folder)) - logits(run.model)).abs().max() < 1e-5
    trained_head = trained_run(headless, modules_to_save=["lm_head"])
    assert trained_head.export(tmp_path / "adapter").form.value == "adapter"


@pytest.mark.parametrize("own", [None, 2, [2, 5]], ids=["no file", "one token", "has it"])
def test_generation_ends_where_answers_do(tmp_path, own):
    """The end of a turn joins the model's own end tokens, in both forms; a file that has it is left as it is."""
    folder = tmp_path / "base"
    make_model(folder, "llama")
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if own is not None:
        file.write_text(json.dumps({"_from_model_config": True, "eos_token_id": own, "temperature": 0.7}))
    from_config = json.loads((folder / "config.json").read_text())["eos_token_id"]
    run = trained_run(folder)
    for merged in (True, False):
        run.export(tmp_path / f"{merged}", end_ids=(5,), merged=merged)
        written = tmp_path / f"{merged}" / "generation_config.json"
        if own == [2, 5]:
            assert written.exists() == merged and (not merged or written.read_bytes() == file.read_bytes())
            continue
        ends = GenerationConfig.from_pretrained(written.parent).eos_token_id
        assert ends == [from_config if own is None else own, 5]
        assert own is None or json.loads(written.read_text())["temperature"] == 0.7
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "True")
    assert 5 in loaded.generation_config.eos_token_id
