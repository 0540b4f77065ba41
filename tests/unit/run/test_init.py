"""`coremill config init` without a terminal: suggestions, answers, refusals, and the file."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import numpy
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from coremill.config.keys import keys
from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.config.task_rules import READ_BY
from coremill.errors import CoremillError, InputError
from coremill.run.init import command
from coremill.run.init.command import init_run_file
from coremill.run.init.findings import columns_of, likely_column, look_around
from coremill.run.init.interview import answers_given
from end_to_end.scene import make_cache
from tiny_models import make_config_folder
from unit.hardware.fake_machine import node_of

SHAPE = "{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COREMILL_CACHE", str(make_cache(tmp_path_factory.mktemp("cache"))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*answers: str, file: str = "run.yaml", yes: bool = True) -> str:
    """What it says."""
    console = Console(file=io.StringIO(), width=200)
    init_run_file(Path(file), answers, yes=yes, is_terminal=False, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def refused(*answers: str, **options: object) -> CoremillError:
    before = sorted(Path().rglob("*"))
    with pytest.raises(InputError) as caught:
        init(*answers, **options)  # type: ignore[arg-type]
    assert sorted(Path().rglob("*")) == before
    return caught.value


def test_every_suggestion_taken_is_the_built_in_example() -> None:
    said = init()
    assert "wrote run.yaml" in said and "memory: " in said
    assert re.search(r"^  model.name: built-in \(.+\)$", said, re.MULTILINE)
    config, example = load_config(Path("run.yaml")).config, load_config(None).config
    assert (config.model, config.train.steps, config.train.learning_rate) == (
        example.model,
        example.train.steps,
        example.train.learning_rate,
    )
    assert config.data.evaluation_fraction == 0.05


def test_the_file_says_what_was_answered_and_gives_it_back() -> None:
    init(f"model.config={SHAPE}", "model.weights=random", "tokenizer=built-in", "train.steps=3", "data.source=built-in",
         "data.sequence_length=64", "fleet.nodes=4", "run.trackers=[tensorboard]")  # fmt: skip
    config = load_config(Path("run.yaml")).config
    assert config.model.config is not None and config.model.config["hidden_size"] == 64
    assert (config.fleet.nodes, config.run.trackers) == (4, ["tensorboard"])
    lines = Path("run.yaml").read_text().splitlines()
    assert any(line.startswith("  steps: 3 ") and "# optimizer steps" in line for line in lines)
    assert all(len(line) < 200 for line in lines)


def test_what_lies_around_is_suggested() -> None:
    make_config_folder(Path("small"), "llama")
    Path("requirements.txt").write_text("coremill\n" * 999)
    Path("books").mkdir()
    for name in ("one", "two"):
        Path("books", f"{name}.jsonl").write_text(json.dumps({"title": "a", "content": "b"}) + "\n")
    Path("hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    found = look_around(node_of(8))
    assert (found.model.value, found.data.value, found.hostfile) == ("small", "books/*.jsonl", "hosts")
    assert found.hosts is not None and found.hosts.value == 2
    assert columns_of("books/*.jsonl") == ["title", "content"] and columns_of("hf://a/b") == []
    said = init("model.weights=random", "tokenizer=built-in", "train.steps=2", "data.sequence_length=32")
    config = load_config(Path("run.yaml")).config
    assert (config.model.name, config.data.column, config.fleet.nodes) == ("small", "content", 2)
    assert "next: coremill train run.yaml --hostfile hosts" in said


def test_the_task_is_suggested_by_model_and_columns() -> None:
    """An encoder can be trained for more than one; the built-in model and a Llama are not asked about."""
    bert = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    Path("bert").mkdir()
    Path("bert", "config.json").write_text(json.dumps({**bert, "num_attention_heads": 2}))
    shapes = {"embeddings.word_embeddings": (99, 32), "encoder.layer.0.output.dense": (32, 64)}
    tensors = {f"bert.{name}.weight": numpy.zeros(shape, numpy.float32) for name, shape in shapes.items()}
    save_file(tensors, "bert/model.safetensors")
    Path("reviews.csv").write_text("text,label\nfine,1\npoor,0\n")
    said = init("train.steps=2", "tokenizer=built-in")
    config = load_config(Path("run.yaml")).config
    assert (config.model.name, config.task, config.data.source) == ("bert", "sequence-classification", "reviews.csv")
    assert "nearest to those of the data: text, label" in said


def test_a_column_is_suggested_for_one_part_of_an_example_only() -> None:
    assert likely_column("label", ["sentiment", "stars"]) == "sentiment"
    assert likely_column("label", ["first", "last"]) == "last"
    config = RunConfig.model_validate(
        {"task": "sequence-classification", "data": {"text_columns": ["review"], "label_column": "stars"}}
    )
    assert command._named_columns(config, config.task, without="data.label_column") == {"review"}


def test_adapters_where_all_weights_are_too_many() -> None:
    """70 B parameters on a machine of tests."""
    if not os.environ.get("COREMILL_LONG_TESTS"):
        pytest.skip("names of modules are asked of torch, a quarter of a minute: COREMILL_LONG_TESTS=1 runs it")
    shape = (
        "{model_type: llama, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, vocab_size: 4096,"
        " num_attention_heads: 64, num_key_value_heads: 8}"
    )
    init(f"model.config={shape}", "model.weights=random", "tokenizer=built-in", "train.steps=3", "data.source=built-in")
    assert load_config(Path("run.yaml")).config.lora.rank == 16


def test_nobody_to_ask() -> None:
    problem = refused(yes=False)
    assert "model.name is not answered" in str(problem) and "--yes" in str(problem) and problem.exit_code == 78
    assert "data.source is not answered" in str(refused("model=built-in", yes=False))
    init("model=built-in", "data.source=built-in", "train.steps=5", "data.evaluation_fraction=0", "fleet.nodes=1",
         yes=False)  # fmt: skip
    assert load_config(Path("run.yaml")).config.train.steps == 5


def test_data_of_other_machines_is_a_warning() -> None:
    said = init("model=built-in", "data.source=/fsx/books/*.txt", "train.steps=5")
    assert "warning: no file matches (data.source: /fsx/books/*.txt)" in said and "wrote run.yaml" in said


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (("train.stepz=3",), "--answer train.stepz=3"),
        (("train.epochs=two",), "must be a number above 0"),
        (("epochs",), "--answer needs key=value"),
        (("train.seed=1", "train.seed=2"), "given twice"),
        (("model=nowhere/",), "nowhere"),
        (("learning_rate=1e-5",), "train.learning_rate"),
    ],
)
def test_answers_that_will_not_do(answers: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    problem = refused(*answers)
    assert told in str(problem) and "--set train.stepz" not in str(problem)


def test_files_that_are_not_written() -> None:
    Path("there.yaml").write_text("model: gpt2\n")
    assert "is there already" in str(refused(file="there.yaml"))
    assert Path("there.yaml").read_text() == "model: gpt2\n"
    assert "does not end in .yaml" in str(refused(file="run.json"))
    assert "is not there" in str(refused(file="nowhere/run.yaml"))


def test_questions_are_keys_of_the_schema_and_columns_come_from_it() -> None:
    """A task that reads another column is asked for it without a change here."""
    assert answers_given(["model=gpt2"]) == {"model.name": "gpt2"}
    config = load_config(None).config
    for task in keys()["task"].choices:
        read = {key for key, readers in READ_BY.items() if task in readers and key.endswith(("column", "columns"))}
        usual = {key for key in read if key.startswith("data.") and keys()[key].default is not None}
        assert set(command._missing_columns(config, task, ["nothing"])) == usual
