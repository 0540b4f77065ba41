"""Rules between keys: each broken one gives one message that points at the lines; the good neighbours load."""

from __future__ import annotations

from pathlib import Path

import pytest

from coremill.config.keys import keys
from coremill.config.load import load_config
from coremill.config.rules import RULES
from coremill.errors import ConfigError

SHAPE = "config: {model_type: llama}"

# text | what | lines pointed at | do
BROKEN = [
    ("train:\n  steps: 5\n  epochs: 1", "train.steps and train.epochs are both given", (2, 3), "train.steps=null"),
    ("train:\n  seed: 5", "neither train.steps nor train.epochs is given", (1,), "steps: 100"),
    ("model: x", "neither train.steps nor train.epochs is given", (), "steps: 100"),
    (
        "train:\n  steps: 5\n  warmup_steps: 5",
        "train.warmup_steps (5) is not below train.steps (5)",
        (2, 3),
        "at most 4",
    ),
    (
        "train:\n  steps: 5\n  warmup_steps: 2\n  warmup_share: 0.1",
        "train.warmup_share and train.warmup_steps are both given",
        (3, 4),
        "train.warmup_share=null",
    ),
    (
        "train:\n  steps: 5\n  decay_share: 0.1",
        "train.decay_share is given, but train.schedule is linear",
        (3,),
        "schedule: warmup-stable-decay",
    ),
    (
        "train:\n  steps: 5\n  schedule: warmup-stable-decay\n  decay_share: 0.9\n  warmup_share: 0.2",
        "train.warmup_share (0.2) and train.decay_share (0.9) are more than the whole run",
        (4, 5),
        "at most 0.8",
    ),
    (
        "train:\n  steps: 5\n  minimum_learning_rate: 1e-3",
        "train.minimum_learning_rate (0.001) is above train.learning_rate (2e-05)",
        (3,),
        "a higher peak",
    ),
    (
        "train:\n  steps: 5\n  schedule: constant\n  minimum_learning_rate: 1e-6",
        "but train.schedule is constant",
        (3, 4),
        "remove the minimum",
    ),
    (
        "train:\n  steps: 5\n  tokens_per_step: 511",
        "(511) is below one row (data.sequence_length is 512)",
        (3,),
        "512 or more",
    ),
    ("train: {steps: 5}\ndata:\n  sequence_length: 32768", "(16384) is below one row", (3,), "32768 or more"),
    (
        f"train: {{steps: 5}}\ntokenizer: x\nmodel:\n  {SHAPE}",
        "model.weights is pretrained",
        (4,),
        "model.weights: random",
    ),
    (f"train: {{steps: 5}}\nmodel:\n  {SHAPE}\n  weights: random", "without a tokenizer", (3,), "tokenizer: built-in"),
    (
        f"train: {{steps: 5}}\ntokenizer: x\nmodel:\n  {SHAPE}\n  weights: random\n  name: a/b",
        "together with model.name (a/b)",
        (4, 6),
        "keep one",
    ),
    (
        "train: {steps: 5}\ntokenizer: x\nmodel:\n  config: {hidden_size: 8}\n  weights: random",
        "model.config has no model_type",
        (4,),
        "model_type: llama",
    ),
    (
        "train: {steps: 5}\ndata:\n  source: a.txt\n  split: test",
        "is not an hf:// dataset",
        (3, 4),
        "remove data.split",
    ),
    (
        "train: {steps: 5}\ndata:\n  source: a.txt\n  evaluation_split: test",
        "data.source (a.txt) is not an hf:// dataset",
        (3, 4),
        "data.evaluation_source",
    ),
    (
        "train: {steps: 5}\ndata:\n  source: hf://a\n  evaluation_source: b.txt\n  evaluation_split: test",
        "data.evaluation_source (b.txt) is not an hf:// dataset",
        (4, 5),
        "evaluation_fraction",
    ),
    (
        "train: {steps: 5}\ndata:\n  evaluation_fraction: 0.1\n  evaluation_source: b.txt",
        "data.evaluation_fraction is given together with data.evaluation_source",
        (3, 4),
        "keep one",
    ),
    (
        "train: {steps: 5}\ndata:\n  source: hf://a\n  evaluation_fraction: 0.1\n  evaluation_split: test",
        "together with data.evaluation_split",
        (4, 5),
        "keep one",
    ),
    ("train: {steps: 5}\nevaluation:\n  every_steps: 2", "nothing to evaluate on", (3,), "evaluation_fraction"),
]


@pytest.mark.parametrize(("text", "what", "lines", "do"), BROKEN, ids=[row[1][:40] for row in BROKEN])
def test_a_broken_rule_points_at_its_lines(tmp_path: Path, text, what, lines, do):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert what in problem.what
    assert problem.why
    assert do in (problem.do or "")
    pointed = (problem.where or "").split(" and ")
    assert sorted(place for place in pointed if ".yaml:" in place) == [
        place for place in sorted(pointed) if any(f"{path}:{line} (" in place for line in lines)
    ]
    assert len([place for place in pointed if ".yaml:" in place]) == len(lines)


@pytest.mark.parametrize(
    "text",
    [
        "train: {steps: 5, warmup_steps: 4}",
        "train: {epochs: 5, warmup_share: 0.2, schedule: warmup-stable-decay, decay_share: 0.8}",
        "train: {steps: 5, schedule: cosine, minimum_learning_rate: 2e-5, freeze: [a.*]}",
        "train: {epochs: 0.5, warmup_steps: 400}",
        "train: {steps: 5, tokens_per_step: 512}",
        f"train: {{steps: 5}}\ntokenizer: built-in\nmodel: {{{SHAPE}, weights: random}}",
        "train: {steps: 5}\ndata: {source: hf://a, split: test, evaluation_split: dev}",
        "train: {steps: 5}\ndata: {source: a.txt, evaluation_source: hf://b, evaluation_split: dev}",
        "train: {steps: 5}\ndata: {source: a.txt, evaluation_source: b.txt, evaluation_fraction: 0}",
        "train: {steps: 5}\ndata: {evaluation_fraction: 0.1}\nevaluation: {every_steps: 2}",
    ],
)
def test_the_good_neighbours_load(tmp_path: Path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    load_config(path)


def test_a_rule_with_set_points_at_the_option(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  steps: 5\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["train.warmup_steps=9"])
    assert caught.value.problems[0].where == f"--set train.warmup_steps=9 and {path}:2 (train.steps)"


def test_rules_read_keys_that_exist_and_say_what_they_hold():
    for rule in RULES:
        assert set(rule.reads) <= set(keys())
        assert rule.summary.endswith(".")
