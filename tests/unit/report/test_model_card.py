"""README.md of an export: what the hub reads, numbers of the report, nothing of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from coremill.config.schema import DataSection, EvaluationSection, ModelSection, RunConfig
from coremill.report.model_card import license_of, model_card
from coremill.report.step_figures import StepFigures, figures_at
from coremill.report.summary import summarise
from unit.report.fake_run import START, make_fake_run, write_line

SUMMARY: dict[str, Any] = {
    "config": "task: causal-lm\n",
    "subject": {"parameters": 1234567, "command": "coremill train /home/me/secret/run.yaml --set train.steps=9"},
    "steps": 30,
    "steps_planned": 100,
    "tokens": 123456,
    "loss_first": 4.0,
    "loss_last": 2.0,
    "seconds": 7200.0,
    "evaluations": [{"step": 20, "loss": 1.5, "perplexity": 4.48, "tokens": 9, "seconds": 0.1}],
    "data": {"evaluation_rows": 500},
    "environment": {
        "world_size": 2,
        "hosts": ["host-of-mine"],
        "fleet": "this machine",
        "threads_per_rank": 4,
        "dtype": "fp32",
        "torch_version": "2.13.0",
    },
}
AT_20 = StepFigures(step=20, tokens=82_000, loss=2.5)


def config_of(model: ModelSection, source: str) -> RunConfig:
    changes = {"model": model, "data": DataSection(source=source), "evaluation": EvaluationSection(rows=64)}
    return RunConfig().model_copy(update=changes)


@pytest.mark.parametrize(
    ("most", "said"),
    [(None, "40 held-out questions, 60 windows"), (50, "held-out questions of at most 50 windows in all")],
)
def test_questions_are_counted_not_their_windows(most: int | None, said: str) -> None:
    config = config_of(ModelSection(name="some/base"), "hf://owner/set")
    changes = {"task": "question-answering", "evaluation": EvaluationSection(rows=most)}
    evaluations = [{"step": 30, "loss": 1.5, "f1": 23.93, "tokens": 9, "seconds": 0.1}]
    data = {"evaluation_rows": 60, "evaluation_documents": 40}
    summary = {**SUMMARY, "config": "task: question-answering\n", "evaluations": evaluations, "data": data}
    text = model_card(summary, config.model_copy(update=changes), name="me/model", license_name=None)
    assert f"| f1 after step 30 | 23.93 on {said} |" in text


def test_of_a_hub_model_and_a_hub_dataset() -> None:
    config = config_of(ModelSection(name="some/base", revision="main"), "hf://owner/set:subset@main")
    text = model_card(SUMMARY, config, name="me/model", license_name="apache-2.0", exported=AT_20)
    front = ModelCard(text).data.to_dict()
    assert front["base_model"] == "some/base" and front["base_model_relation"] == "finetune"
    assert front["datasets"] == ["owner/set"]
    assert front["license"] == "apache-2.0"
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "text-generation"
    assert "coremill" in front["tags"]
    assert "| base model | some/base at main |" in text
    assert "| steps | 30 of 100, this is step 20 |" in text
    assert "| perplexity after step 20 | 4.48 on 64 held-out rows |" in text
    assert "| tokens | 82,000 |" in text
    assert "| training loss | 4.0000 in the first step, 2.5000 in step 20 |" in text
    assert "| hours | 2, of all 30 steps |" in text
    assert 'from_pretrained("me/model")' in text


def test_a_commit_that_was_read_takes_the_place_of_a_branch() -> None:
    commits = {"some/base": "c0ffee", "hf://owner/set:subset@main": "0ddba11"}
    summary = {**SUMMARY, "subject": {**SUMMARY["subject"], "commits": commits}}
    for revision in (None, "main"):
        config = config_of(ModelSection(name="some/base", revision=revision), "hf://owner/set:subset@main")
        text = model_card(summary, config, name="me/model", license_name=None)
        assert "| base model | some/base at c0ffee |" in text
        assert "| data | hf://owner/set:subset@0ddba11 |" in text


@pytest.mark.parametrize("exported", [None, StepFigures(step=30, tokens=123456, loss=2.0)])
def test_the_last_step_has_the_numbers_of_the_run(exported: StepFigures | None) -> None:
    text = model_card(SUMMARY, RunConfig(), name="out", license_name=None, exported=exported)
    assert "| steps | 30 of 100 |" in text and "| tokens | 123,456 |" in text and "| hours | 2 |" in text
    assert "| training loss | 4.0000 in the first step, 2.0000 in the last |" in text
    assert "| parameters | 1,234,567 |" in text


def test_what_was_frozen_is_counted() -> None:
    train = RunConfig().train.model_copy(update={"freeze": ["*embed*"]})
    subject = {**SUMMARY["subject"], "trainable_parameters": 1_000_000}
    config = RunConfig().model_copy(update={"train": train})
    text = model_card({**SUMMARY, "subject": subject}, config, name="out", license_name=None)
    assert "| parameters | 1,234,567, 234,567 of them frozen |" in text


def test_the_figures_of_a_step_leave_out_what_was_set_aside(tmp_path: Path) -> None:
    run = make_fake_run(tmp_path / "run", world_size=1, steps=30, total_steps=30)
    whole = summarise(run)
    found = figures_at(run, 20)
    assert found.tokens == round(whole["tokens"] * 20 / 30) and found.loss == whole["series"]["loss"][19]
    assert figures_at(run, 30) == StepFigures(30, whole["tokens"], whole["loss_last"])
    write_line(run, 0, "set_aside", START + 1e6, after_step=19, steps=[30], folder="aside")
    assert figures_at(run, 20).tokens == figures_at(run, 19).tokens


def test_nothing_of_this_machine_and_nothing_unknown() -> None:
    config = config_of(ModelSection(name="/home/me/models/base"), "/home/me/secret/*.jsonl")
    text = model_card(SUMMARY, config, name="out", license_name=None)
    assert "/home" not in text and "host-of-mine" not in text and "secret/" not in text
    assert "| command | `coremill train run.yaml --set train.steps=9` |" in text
    front = ModelCard(text).data.to_dict()
    assert not {"base_model", "datasets", "license"} & front.keys()
    assert "perplexity" not in text  # the last step was not evaluated


def test_of_several_sources() -> None:
    listed = DataSection.model_validate({"sources": ["hf://one/set", {"source": "/home/me/secret/two.csv"}]})
    config = RunConfig().model_copy(update={"data": listed})
    text = model_card(SUMMARY, config, name="out", license_name=None)
    assert ModelCard(text).data.to_dict()["datasets"] == ["one/set"]
    assert "| data | hf://one/set, two.csv |" in text


@pytest.mark.parametrize("model", [ModelSection(), ModelSection(name="some/base", weights="random")])
def test_random_weights_have_no_base(model: ModelSection) -> None:
    text = model_card(SUMMARY, config_of(model, "built-in"), name="out", license_name="mit")
    assert not {"base_model", "license"} & ModelCard(text).data.to_dict().keys()
    assert "from random weights" in text


def test_the_license_is_the_bases_own_or_none(tmp_path: Path) -> None:
    assert license_of(tmp_path) is None
    readme = tmp_path / "README.md"
    readme.write_text("# a model\n\nmit\n")
    assert license_of(tmp_path) is None
    readme.write_text("---\nlicense: [broken\n---\n")
    assert license_of(tmp_path) is None
    readme.write_text("---\nlicense: mit\ntags:\n- x\n---\n# a model\n")
    assert license_of(tmp_path) == "mit"
