# ruff: noqa: E501 (the tables: one bad file, one row)
"""Bad run files: every message says what, where, why and what to do, and all of them come at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from coremill.config.foreign import foreign_keys
from coremill.config.keys import keys
from coremill.config.load import load_config
from coremill.config.unknown_keys import explain_unknown_key
from coremill.errors import ConfigError, InputError

PYDANTIC_JARGON = (
    "Input should be",
    "literal[",
    "constrained",
    "pydantic",
    "valid dictionary",
    "type=",
    "extra_forbidden",
)


def problems_of(tmp_path: Path, text: str, *overrides: str) -> tuple[InputError, ...]:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 78
    assert not any(word in str(caught.value) for word in PYDANTIC_JARGON)
    for problem in caught.value.problems:
        assert problem.where and problem.do, problem
    return caught.value.problems


# text of the file | what | line and key | part of why | part of do
FILES = [
    # unknown keys
    ("train: {steps: 1}\ntrian: {steps: 1}", "unknown key trian", "2 (trian)", "the top level has", "did you mean train?"),
    ("train:\n  stepz: 1", "unknown key train.stepz", "2 (train.stepz)", "steps, epochs", "did you mean train.steps?"),
    ("train:\n  steps: 1\n  Learning-Rate: 1", "unknown key train.Learning-Rate", "3 (", "has", "train.learning_rate?"),
    ("train: {steps: 1}\nlearning_rate: 1", "unknown key learning_rate", "2 (learning_rate)", "belongs in the section train", "move it under train:"),
    ("train:\n  steps: 1\n  sequence_length: 8", "unknown key train.sequence_length", "3 (", "belongs in the section data", "data.sequence_length"),
    ("train:\n  steps: 1\n  tokenizer: x", "unknown key train.tokenizer", "3 (", "at the top level", "outside train:"),
    ("train:\n  steps: 1\n  data:\n    column: x", "unknown key train.data", "3 (", "a section of its own", "outside train:"),
    ("train: {steps: 1}\nlearning_rat: 1", "unknown key learning_rat", "2 (", "", "did you mean train.learning_rate, in another section?"),
    ("train: {steps: 1}\nzzz: 1", "unknown key zzz", "2 (zzz)", "the top level has", "remove it"),
    ("train: {steps: 1}\n7: 1", "unknown key 7", "2 (7)", "", "remove it"),
    ("train.steps: 1", "unknown key train.steps", "1 (train.steps)", "nested", "write steps: indented under train:"),
    # wrong types
    ('train:\n  steps: "50"', "train.steps must be a whole number above 0 or null, not the text '50'", "2 (", "optimizer steps", "remove the quotes: 50"),
    ('train: {steps: 1}\ndata:\n  evaluation_fraction: "2e-5"', "data.evaluation_fraction must be a number", "3 (", "share", "remove the quotes: 2e-5"),
    ("train:\n  steps: 1\n  tokens_per_step: 16k", "train.tokens_per_step must be a whole number above 0, not the text '16k'", "3 (", "", "write digits"),
    ("train:\n  steps: 1e3", "not 1000.0", "2 (train.steps)", "", "write 1000"),
    ("train:\n  steps: 1.5", "not 1.5", "2 (train.steps)", "", "give a whole number above 0"),
    ("train:\n  steps: true", "not true", "2 (train.steps)", "", "give a whole number above 0"),
    ("train:\n  steps: 1\n  learning_rate: true", "train.learning_rate must be a number above 0, not true", "3 (", "", "give"),
    ("train:\n  steps: 1\n  learning_rate:", "train.learning_rate must be a number above 0, not empty", "3 (", "", "default (2e-05)"),
    ("train: {steps: 1}\nrun: {export: yes}", "run.export must be true or false, not the text 'yes'", "2 (", "", "write true or false"),
    ("train: {steps: 1}\nmodel: {revision: 1234}", "model.revision must be text or null, not 1234", "2 (", "", 'put it in quotes: "1234"'),
    ("train: {steps: 1}\nmodel: {revision: 12e4567}", "model.revision must be text or null, not inf", "2 (", "", "put it in quotes"),
    ("train: {steps: 1}\ndata: {source: [a, b]}", "data.source must be text, not a list", "2 (", "glob", "give text"),
    ("train: {steps: 1}\nmodel: 5", "model must be text, or a section of keys, not 5", "2 (model)", "name, revision", "model.name"),
    ("train: 5", "train must be a section of keys, not 5", "1 (train)", "steps, epochs", "--set train.steps"),
    ("train: {steps: 1}\nmodel: ''", "model.name must be text, not the text ''", "2 (", "", "not empty"),
    ("train: {steps: 1}\nmodel: {config: {5: x}}", "model.config must be a mapping or null, not a mapping", "2 (", "", "use text for the keys"),
    ("train: {steps: 1}\nmodel: {config: [x]}", "model.config must be a mapping or null, not a list", "2 (", "", "give a mapping"),
    # out of range
    ("train:\n  steps: 0", "train.steps must be a whole number above 0 or null, not 0", "2 (", "", "above 0"),
    ("train:\n  steps: 1\n  seed: -1", "train.seed must be a whole number of at least 0 and below 18446744073709551616, not -1", "3 (", "", "at least 0"),
    ("train: {steps: 1, seed: 18446744073709551616}", "train.seed must be a whole number of at least 0 and below", "1 (", "", "below"),
    ("train: {steps: 1}\ndata: {evaluation_fraction: 1.0}", "a number of at least 0 and below 1, not 1.0", "2 (", "", "below 1"),
    ("train:\n  steps: 1\n  learning_rate: .inf", "train.learning_rate must be a number above 0, not inf", "3 (", "", "give"),
    ("train:\n  steps: 1\n  micro_batch_rows: 0", "train.micro_batch_rows must be auto or a whole number above 0, not 0", "3 (", "", "auto"),
    # choices
    ("train: {steps: 1}\nparallel: {engine: sharded}", "parallel.engine must be one of auto, replicate, shard, not the text 'sharded'", "2 (", "1/N", "did you mean shard?"),
    ("train: {steps: 1}\nparallel: {dtype: int8}", "parallel.dtype must be one of auto, fp32, bf16", "2 (", "", "give one of auto, fp32, bf16"),
    ("train:\n  steps: 1\n  micro_batch_rows: atuo", "train.micro_batch_rows must be auto or a whole number", "3 (", "", "did you mean auto?"),
    # not in this release
    ("train: {steps: 1}\nlora: {alpha: 8}", "lora.alpha is given without lora.rank", "2 (lora.alpha)", "all weights", "16"),
    ("train: {steps: 1}\nlora: {rank: 0}", "lora.rank", "2 (lora.rank)", "", "above 0"),
    ("train: {steps: 1}\ncompile: true", "compile is not in this release", "2 (", "nothing is compiled", "remove it"),
    ("train: {steps: 1}\ncheckpoint: {every: 10 minutes}", "checkpoint.every must be a time (30s, 10m, 1h)", "2 (", "save", "write a time"),
    ("train: {steps: 1, save_steps: 100}", "unknown key train.save_steps", "1 (", "another name", "checkpoint.every"),
    ("train: {steps: 1}\nparallel: {deepspeed: z.json}", "parallel.deepspeed is not in this release", "2 (", "shard", "remove it"),
    ("train: {steps: 1}\nparallel: {engine: deepspeed}", "parallel.engine: deepspeed is not in this release", "2 (", "DeepSpeed itself is not run", "shard"),
    ("train: {steps: 1}\ndevice: cuda", "device: cuda is not in this release", "2 (device)", "CPUs", "device: cpu"),
    ("train: {steps: 1}\ntask: token-classification", "task: token-classification is not in this release", "2 (task)", "there are causal-lm", "causal-lm"),
    # the text itself
    ("train:\n  steps: 1\n  steps: 2", "train.steps is given twice", "3 (train.steps)", "line 2", "keep one"),
    ("train: {steps: 1}\ntrain: {steps: 2}", "train is given twice", "2 (train)", "line 1", "keep one"),
    ("train: {steps: 1}\n<<: {a: 1}", "<< is not supported", "2", "", "write the keys out"),
    ("train: {steps: !!python/name:os.system 1}", "the tag", "1 (train.steps)", "", "remove the tag"),
    ("train: {steps: 1}\n[a]: 1", "a key must be a single word", "2", "", "brackets"),
    ("train: {steps: 1}\nmodel: {config: &a {x: *a}}", "the value contains itself", "2 (model.config.x)", "", "write the value out"),
    ("train: {steps: 1, seed: " + "9" * 5000 + "}", "is not a number that can be read", "1 (train.seed)", "", "digits"),
    ("train:\n\tsteps: 1", "this is not valid YAML", "2:1", "'\\t'", "spaces, not tabs"),
    ("train:\n  steps: 1\n   seed: 2", "this is not valid YAML", "3:8", "at: seed: 2", "indentation"),
    ("sample:\n  prompt: a: b", "this is not valid YAML", "2:12", "mapping values", "quotes"),
    ("data:\n  source: *.txt", "this is not valid YAML", "2:11", "alias", "quotes around a value that starts with *"),
    ("train: {steps: 1", "this is not valid YAML", "1:", "", "close the bracket"),
    ("model: 'x", "this is not valid YAML", "1:", "", "close the quote"),
    ("train: {steps: 1}\n---\nmodel: x", "this is not valid YAML", "2:1", "another document", "one run per file"),
    ("train: {steps: 1}\nmodel: a\x01b", "the character U+0001 is not allowed in YAML", "2:9", "", "remove it"),
    ("[" * 1000, "nested too deeply", "1:1", "", "fewer levels"),
    ("- train", "a run file holds keys and values, not a list", "1", "mapping of sections", "key: value"),
    ("train:5", "a run file holds keys and values, not the text 'train:5'", "1", "", "a space after the colon"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "what", "where", "why", "do"), FILES, ids=[row[1][:50] for row in FILES])
def test_one_mistake_one_message(tmp_path, text, what, where, why, do):
    (problem,) = problems_of(tmp_path, text)
    assert what in problem.what
    assert (problem.where or "").startswith(f"{tmp_path}/run.yaml:{where}")
    assert why in (problem.why or "")
    assert do in (problem.do or "")


OVERRIDES = [
    ("train.steps", "--set needs key=value", "", "--set train.steps=100"),
    ("=5", "--set needs a key", "", "--set train.steps=100"),
    ("train..steps=5", "--set needs a key", "", "--set train.steps=100"),
    ("steps=5", "unknown key steps", "belongs in the section train", "train.steps"),
    ("train.stepz=5", "unknown key train.stepz", "", "did you mean train.steps?"),
    ("trian.steps=5", "unknown key trian", "", "did you mean train?"),
    ("train.seed.x=5", "unknown key train.seed.x", "single value", "--set train.seed="),
    ("tokenizer.name=x", "unknown key tokenizer.name", "single value", "--set tokenizer="),
    (
        "train.seed=abc",
        "train.seed must be a whole number of at least 0 and below 18446744073709551616, not the text 'abc'",
        "",
        "write digits",
    ),
    ("train.seed=[1", "the value of --set train.seed cannot be read", "flow sequence", "quotes"),
    ("train=5", "train must be a section of keys, not 5", "", "train.steps"),
    ("data.source=", "data.source must be text, not empty", "", "default (built-in)"),
    ("device=cuda", "device: cuda is not in this release", "", "device: cpu"),
    ("bf16=true", "unknown key bf16: another tool's setting", "", "parallel.dtype"),
    ("model=a\udcffb", "--set takes UTF-8 text only", "", "run file"),
]


@pytest.mark.parametrize(
    ("override", "what", "why", "do"), OVERRIDES, ids=[row[0].encode("utf-8", "replace").decode() for row in OVERRIDES]
)
def test_overrides_that_cannot_be(tmp_path, override, what, why, do):
    (problem,) = problems_of(tmp_path, "train: {steps: 1}", override)
    assert what in problem.what
    assert (problem.where or "") == "--set " + override.encode("utf-8", "backslashreplace").decode()
    assert why in (problem.why or "")
    assert do in (problem.do or "")


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("per_device_train_batch_size", "train.tokens_per_step"),
        ("gradient_accumulation_steps", "train.tokens_per_step"),
        ("num_train_epochs", "train.epochs"),
        ("max_steps", "train.steps"),
        ("bf16", "parallel.dtype"),
        ("fp16", "parallel.dtype"),
        ("mixed_precision", "parallel.dtype"),
        ("use_ipex", "remove it"),
        ("ddp_backend", "remove it"),
        ("max_length", "data.sequence_length"),
        ("block_size", "data.sequence_length"),
        ("num_processes", "parallel.ranks_per_node"),
        ("deepspeed", "parallel.engine"),
    ],
)
@pytest.mark.parametrize("section", ["", "train"])
def test_settings_of_other_tools_lead_to_ours(section, name, ours):
    unknown = explain_unknown_key(section, name)
    assert "another tool's setting" in unknown.what
    assert ours in unknown.do


def test_the_table_of_foreign_names_is_sound():
    own = {key.name for key in keys().values()}
    for name, foreign in foreign_keys().items():
        assert name not in own, f"{name} is one of ours"
        assert set(foreign.targets) <= set(keys()), name


def test_all_problems_at_once_in_the_order_of_the_file(tmp_path):
    text = "modle: x\ntrain:\n  steps: x\n  lr: 1\n  seed: -1\ndata:\n  sequence_length: 64\nparallel: {engine: z}\n"
    problems = problems_of(tmp_path, text, "run.export=3", "train.tokens_per_step=32")
    places = [(problem.where or "").removeprefix(f"{tmp_path}/run.yaml:").split()[0] for problem in problems]
    assert places == ["1", "3", "4", "5", "8", "--set", "--set"]
    assert "below one row" in problems[-1].what  # rules between good keys are checked beside bad ones
    message = str(ConfigError(problems))
    assert message.startswith("7 problems in the config\n- unknown key modle")


def test_one_slip_gives_no_second_message(tmp_path):
    """`stepz` also leaves the run without a length, and `max_steps` too: the first message is enough."""
    assert len(problems_of(tmp_path, "train: {stepz: 5}")) == 1
    assert len(problems_of(tmp_path, "trian: {steps: 5}")) == 1
    assert len(problems_of(tmp_path, "max_steps: 5")) == 1
    assert len(problems_of(tmp_path, "train: [5]")) == 1


def test_a_missing_file_names_what_is_there(tmp_path):
    (tmp_path / "llama.yaml").touch()
    (tmp_path / "other.yml").touch()
    (tmp_path / "note.txt").touch()
    (near,) = file_problems(tmp_path / "lama.yaml")
    assert near.what == f"there is no file {tmp_path}/lama.yaml"
    assert near.do == f"did you mean {tmp_path}/llama.yaml?"
    (far,) = file_problems(tmp_path / "zzz")
    assert far.do == f"name one of {tmp_path}/llama.yaml, {tmp_path}/other.yml"
    (bare,) = file_problems(tmp_path / "llama")
    assert "llama.yaml" in (bare.do or "")


def test_a_folder_is_not_a_file(tmp_path):
    (tmp_path / "llama.yaml").touch()
    (problem,) = file_problems(tmp_path)
    assert problem.what == f"{tmp_path} is a folder, not a run file"
    assert "llama.yaml" in (problem.do or "")


def test_a_missing_folder_and_a_forgotten_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = file_problems(tmp_path / "no" / "run.yaml")
    assert problem.why == f"there is no folder {tmp_path}/no"
    (problem,) = file_problems(Path("train.steps=5"))
    assert problem.do == "a single value is changed with --set train.steps=5"


def test_files_that_cannot_be_read(tmp_path):
    binary = tmp_path / "model.yaml"
    binary.write_bytes(b"model: \xff\xfe")
    (problem,) = file_problems(binary)
    assert "not a text file" in problem.what and "UTF-8" in (problem.do or "")
    (problem,) = file_problems(binary / "run.yaml")
    assert "cannot be read" in problem.what


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    (problem,) = file_problems(tmp_path / "closed.yaml")
    assert "cannot be read" in problem.what and problem.why == "permission denied"


def file_problems(path: Path) -> tuple[InputError, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return caught.value.problems


@pytest.mark.parametrize(
    ("setting", "what", "do"),
    [
        ("run.trackers=[all]", "and has the text 'all' in it", "write [tensorboard, wandb, mlflow], or those"),
        ("run.trackers=all", "not the text 'all'", "write [tensorboard, wandb, mlflow], or those"),
        ("run.trackers=[wandb, mlfow]", "and has the text 'mlfow' in it", "write [wandb, mlflow]"),
        ("run.trackers=[wandb, comet]", "and has the text 'comet' in it", "write [wandb]"),
        ("train.freeze=[1, lm_head.*]", "and has 1 in it", "write ['1', lm_head.*]"),
    ],
)
def test_what_is_wrong_with_a_list_is_in_it(setting: str, what: str, do: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    (problem,) = caught.value.problems
    assert what in problem.what and (problem.do or "").startswith(do)
