"""--model and --data: what a try without a run file is made of, and what they take from a run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from coremill.config.load import load_config
from coremill.errors import ConfigError


def test_one_epoch_of_the_defaults_unless_said():
    loaded = load_config(None, model="gpt2", data="notes.txt")
    config = loaded.config
    assert (config.model.name, config.data.source) == ("gpt2", "notes.txt")
    assert (config.train.epochs, config.train.steps, config.train.learning_rate) == (1.0, None, 2e-5)
    assert loaded.without_file == ("no run file: gpt2 on notes.txt for one epoch, every other key has its default")
    assert [str(loaded.origins[key]) for key in ("model.name", "data.source")] == ["--model", "--data"]


@pytest.mark.parametrize(
    ("overrides", "epochs", "steps", "words"),
    [
        (["train.steps=30"], None, 30, "for 30 steps"),
        (["train.epochs=2.5"], 2.5, None, "for 2.5 epochs"),
        ({"train.steps": 1}, None, 1, "for 1 step,"),
    ],
)
def test_the_length_may_be_given(overrides, epochs, steps, words):
    loaded = load_config(None, overrides, model="gpt2", data="notes.txt")
    assert (loaded.config.train.epochs, loaded.config.train.steps) == (epochs, steps)
    assert words in (loaded.without_file or "")


def test_text_alone_is_learned_by_the_built_in_model_as_the_example_learns():
    example, loaded = load_config(None).config, load_config(None, data="notes.txt")
    config = loaded.config
    assert config.model.name == "built-in" and config.data.source == "notes.txt"
    assert config.train.learning_rate == example.train.learning_rate
    assert (config.train.epochs, config.train.steps, config.sample.prompt) == (1.0, None, None)
    assert "every other key is the built-in example's" in (loaded.without_file or "")
    assert load_config(None, model="built-in", data="notes.txt").config == config


def test_a_model_alone_learns_the_standard_library():
    loaded = load_config(None, model="gpt2")
    assert loaded.config.data.source == "built-in"
    assert "gpt2 on the Python standard library (built-in) for one epoch" in (loaded.without_file or "")


def names_of(*tries: tuple[str | None, str | None]) -> list[str]:
    return [load_config(None, model=model, data=data).name for model, data in tries]


def test_the_folder_is_named_by_model_and_text():
    assert names_of(("gpt2", "notes.txt"), ("gpt2", None), (None, "notes.txt")) == [
        "gpt2-notes",
        "gpt2-built-in",
        "built-in-notes",
    ]
    long = names_of(
        ("models/my model", "data/train.jsonl.gz"),
        ("Qwen/Qwen2.5-0.5B", "hf://wikitext:wikitext-2-raw-v1"),
        ("gpt2", "/books/*.txt"),
    )
    assert [name.rpartition("-")[0] for name in long] == ["my-model-train", "Qwen2.5-0.5B-wikitext", "gpt2-books"]


def test_other_models_and_texts_of_the_same_name_have_other_folders():
    names = names_of(("a/m", "x/t.txt"), ("b/m", "x/t.txt"), ("a/m", "y/t.txt"), ("a/m", "x/t.csv"), ("m", "t.txt"))
    assert len(set(names)) == len(names)
    assert names_of(("a/m", "x/t.txt")) == names[:1]


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["model=b"], {"model": "a"}),
        (["model.name=b"], {"model": "a"}),
        (["model.config.model_type=gpt2"], {"model": "a"}),
        (["data.source=y.txt"], {"model": "a", "data": "x.txt"}),
    ],
)
def test_a_contradiction_is_told(overrides, options):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides, **options)
    (problem,) = caught.value.problems
    assert f"--set {overrides[0]}" in (problem.where or "") and "--" in problem.what
    assert problem.do == "keep one of them"


def test_the_same_said_twice_is_none():
    assert load_config(None, ["model=a", "data.source=x"], model="a", data="x").config.model.name == "a"


RUN_FILE = """\
model: {weights: random, config: {model_type: llama, vocab_size: 512}}
tokenizer: built-in
data: {source: old.txt, sequence_length: 64}
train: {steps: 9, learning_rate: 0.5}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(RUN_FILE)
    return tmp_path / "mine.yaml"


def test_beside_a_run_file_they_go_over_it(run_file: Path):
    loaded = load_config(run_file, model="gpt2", data="new.txt")
    config = loaded.config
    assert (config.model.name, config.model.config, config.model.weights) == ("gpt2", None, "pretrained")
    assert (config.tokenizer, config.data.source, config.data.sequence_length) == (None, "new.txt", 64)
    assert (config.train.steps, config.train.epochs, config.train.learning_rate) == (9, None, 0.5)
    assert (loaded.name, loaded.without_file) == ("mine", None)
    (note,) = loaded.notes
    assert note.startswith("--model gpt2: model.config, model.weights, tokenizer of ") and "are left out" in note


def test_set_goes_over_them(run_file: Path):
    loaded = load_config(run_file, ["tokenizer=words", "model.weights=random"], model="gpt2")
    assert (loaded.config.tokenizer, loaded.config.model.weights) == ("words", "random")


def test_without_them_nothing_is_noted(run_file: Path):
    assert load_config(run_file).notes == ()


def test_values_from_python_say_where_they_stand(run_file: Path):
    with pytest.raises(ConfigError) as caught:
        load_config(run_file, {"train.steps": "many", "data.souce": "x"})
    unknown, wrong = sorted(caught.value.problems, key=lambda problem: problem.where or "")
    assert unknown.where == "settings={'data.souce': 'x'}" and wrong.where == "settings={'train.steps': 'many'}"
