"""Loading: precedence, origins, what is taken and what it becomes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coremill.config.keys import keys
from coremill.config.load import LoadedConfig, load_config
from coremill.config.schema import RunConfig
from coremill.errors import ConfigError

FILE = """\
# a comment, so that lines do not start at one
model: some/id
data:
  source: data/*.txt

  sequence_length: 128
train: {steps: 10, learning_rate: 2e-5}
"""


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str = FILE, *overrides: str) -> LoadedConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return load


def test_precedence_is_default_file_set(load):
    loaded = load(FILE, "train.steps=20", "train.steps=30")
    assert loaded.config.train.steps == 30
    assert loaded.config.data.sequence_length == 128
    assert loaded.config.train.seed == 7
    assert {key: str(loaded.origins[key]) for key in ("train.steps", "data.sequence_length", "train.seed")} == {
        "train.steps": "--set",
        "data.sequence_length": "run.yaml:6",
        "train.seed": "default",
    }


def test_every_leaf_has_an_origin(load):
    loaded = load()
    assert set(loaded.origins) == set(keys())
    leaves = {
        f"{section}.{name}"
        for section, value in loaded.config.model_dump().items()
        if isinstance(value, dict)
        for name in value
    }
    assert leaves <= set(loaded.origins)


def test_origins_inside_a_free_mapping(load):
    text = "model:\n  weights: random\n  config:\n    model_type: llama\n    rope_scaling:\n      factor: 2.0\n"
    loaded = load(text + "tokenizer: built-in\ntrain: {steps: 1}\n", "model.config.rope_scaling.kind=linear")
    assert loaded.config.model.config == {"model_type": "llama", "rope_scaling": {"factor": 2.0, "kind": "linear"}}
    assert str(loaded.origins["model.config"]) == "run.yaml:3"
    assert str(loaded.origins["model.config.rope_scaling.factor"]) == "run.yaml:6"
    assert str(loaded.origins["model.config.rope_scaling.kind"]) == "--set"


def test_where_is_a_place_to_go_to(load, tmp_path):
    loaded = load(FILE, "run.folder=out")
    assert loaded.where("train.steps") == f"{tmp_path}/run.yaml:7 (train.steps)"
    assert loaded.where("run.folder") == "--set run.folder=out"
    assert loaded.where("train.seed") == "train.seed (default)"


def test_name_path_and_text(load, tmp_path):
    loaded = load()
    assert (loaded.name, loaded.path, loaded.text) == ("run", tmp_path / "run.yaml", FILE)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("model=foo", "foo"),
        ("model.name=foo", "foo"),
        ("model={name: foo}", "foo"),
        ('model="foo"', "foo"),
        ("model=./a b", "./a b"),
    ],
)
def test_the_model_by_set(load, override, name):
    loaded = load("model: {name: x, revision: main}\ntrain: {steps: 1}\n", override)
    assert loaded.config.model.name == name
    assert loaded.config.model.revision == "main"
    assert str(loaded.origins["model.name"]) == "--set"


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("train.learning_rate=2e-5", "train", "learning_rate", 2e-5),
        ("train.learning_rate=1", "train", "learning_rate", 1.0),
        ("train.clip_norm=null", "train", "clip_norm", None),
        ("train.clip_norm=", "train", "clip_norm", None),
        ("train.tokens_per_step=16_384", "train", "tokens_per_step", 16384),
        ("train.activation_checkpointing=true", "train", "activation_checkpointing", True),
        ("train.micro_batch_rows=auto", "train", "micro_batch_rows", "auto"),
        ("data={source: b.txt, column: body}", "data", "column", "body"),
        ("data.source=*.txt", "data", "source", "*.txt"),
        ("data.source=a=b.txt", "data", "source", "a=b.txt"),
        ("data.source=hf://wikitext:wikitext-2-raw-v1@main", "data", "source", "hf://wikitext:wikitext-2-raw-v1@main"),
        ("model.revision=12e4567", "model", "revision", "12e4567"),
        ("model.revision=null", "model", "revision", None),
        ("sample.prompt=def f(): # x", "sample", "prompt", "def f(): # x"),
        ("sample.prompt=def ", "sample", "prompt", "def "),
        ('sample.prompt="a\\nb"', "sample", "prompt", "a\nb"),
    ],
)
def test_values_by_set(load, override, section, name, value):
    found = getattr(getattr(load(FILE, override).config, section), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "rate"),
    [("2e-5", 2e-5), ("2.0e-5", 2e-5), ("2E-5", 2e-5), ("1", 1.0), (".5", 0.5), ("1_0e-1", 1.0)],
)
@pytest.mark.parametrize("directive", ["", "%YAML 1.1\n---\n"])
def test_numbers_as_people_write_them(load, directive, line, rate):
    loaded = load(f"{directive}train:\n  steps: 1\n  learning_rate: {line}\n")
    assert loaded.config.train.learning_rate == rate
    assert isinstance(loaded.config.train.learning_rate, float)


def test_a_date_is_text(load):
    assert load("run: {folder: 2026-01-01}\ntrain: {steps: 1}\n").config.run.folder == "2026-01-01"


def test_an_alias_is_its_value(load):
    loaded = load("tokenizer: &id some/id\nmodel: *id\ntrain: {steps: 1}\n")
    assert loaded.config.model.name == "some/id"
    assert str(loaded.origins["model.name"]) == "run.yaml:2"


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "{}\n", "train:\n", "train:\n  # steps: 5\nmodel:\n", "\ufeff"]
)
def test_an_empty_file_is_all_defaults(load, text):
    loaded = load(text, "train.steps=5")
    assert loaded.config.model_dump(exclude={"train"}) == load("train: {steps: 1}").config.model_dump(exclude={"train"})


def test_without_a_file_the_built_in_example(capsys):
    loaded = load_config(None, ["train.steps=30"])
    assert (loaded.name, loaded.path) == ("built-in", None)
    assert (loaded.config.model.name, loaded.config.tokenizer, loaded.config.data.source) == ("built-in",) * 3
    assert str(loaded.origins["model.name"]).startswith("built-in:")
    assert loaded.config.sample.prompt == "    def read(self"
    assert loaded.text.startswith("# coremill train\n")


def test_the_config_cannot_be_changed():
    config = load_config(None).config
    with pytest.raises(ValueError):
        config.train.steps = 3  # type: ignore[misc]


def test_all_is_checked_also_for_the_built_in_example():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["train.epochs=1"])
    assert "--set train.epochs=1" in (caught.value.problems[0].where or "")
    assert load_config(None, ["train.epochs=1", "train.steps=null"]).config.train.epochs == 1.0


def test_loading_needs_no_torch():
    code = (
        "import sys\n"
        "from coremill.config.load import load_config\n"
        "from coremill.config.show import show, json_schema\n"
        "show(load_config(None)); json_schema()\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=240)


@pytest.mark.parametrize(
    ("overrides", "named", "name"),
    [
        (["model=models/my model", "data.source=d/*.txt"], "model and data.source", "my-model"),
        (["model.name=Qwen/Qwen2.5-0.5B"], "model", "Qwen2.5-0.5B"),
        (["model={name: ../m}"], "model", "m"),
        (["data.source=*.jsonl"], "data.source", "built-in-model"),
        (["data={source: '*.jsonl'}"], "data.source", "built-in-model"),
        (["model.config.model_type=gpt2", "model.weights=random", "tokenizer=t"], "model.config", "gpt2"),
    ],
)
def test_without_a_file_naming_a_model_or_data_starts_from_the_defaults(overrides, named, name):
    loaded = load_config(None, [*overrides, "train.steps=6"])
    defaults = RunConfig().train.model_copy(update={"steps": 6})
    assert loaded.config.train == defaults and loaded.config.sample.prompt is None
    assert loaded.config.tokenizer == ("t" if "tokenizer=t" in overrides else None)
    assert loaded.without_file == f"no run file: {named} by --set, every other key has its default"
    assert loaded.name == name
    assert str(loaded.origins["train.learning_rate"]) == "default"


@pytest.mark.parametrize(
    "overrides", [[], ["train.steps=5"], ["model.attention=eager"], ["data.sequence_length=64"], ["model=built-in"]]
)
def test_without_a_file_anything_else_changes_the_example(overrides):
    loaded = load_config(None, overrides)
    assert loaded.config.train.learning_rate == 5e-3 and loaded.config.tokenizer == "built-in"
    assert (loaded.name, loaded.without_file) == ("built-in", "no run file: the built-in example")


def test_what_is_missing_without_a_file_is_missing_on_the_command_line():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model=m", "data.source=d.txt"])
    (problem,) = caught.value.problems
    assert problem.where == "command line (train.steps)" and "--set train.steps=100" in (problem.do or "")


@pytest.mark.parametrize("value", ["null", "", "~"])
def test_a_section_set_to_null_is_as_if_it_were_not_there(load, value):
    text = f"{FILE}lora: {{rank: 8, alpha: 4}}\n"
    assert load(text).config.lora.rank == 8
    without = load(text, f"lora={value}")
    assert without.config == load(FILE).config and str(without.origins["lora.rank"]) == "default"
    again = load(text, f"lora={value}", "lora.rank=4").config.lora
    assert (again.rank, again.alpha) == (4, None)
    assert load(f"{FILE}lora:\n", "lora.rank=2").config.lora.rank == 2
    assert load(FILE, "data=null").config.data == RunConfig().data
