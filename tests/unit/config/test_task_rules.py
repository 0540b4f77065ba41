"""Keys go with the tasks that read them, and are refused elsewhere with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from coremill.config.keys import keys
from coremill.config.rules import breaches_of
from coremill.config.schema import RunConfig
from coremill.config.task_rules import READ_BY

NAMED = {"model": {"name": "some/encoder"}}
SOURCE = {"source": "train.jsonl"}


def broken(**sections: Any) -> list[str]:
    config = RunConfig.model_validate({**NAMED, **sections})
    return [breach.key for breach in breaches_of(config, frozenset()) if breach.key != "train.steps"]


@pytest.mark.parametrize("task", ["question-answering", "sequence-classification"])
def test_an_encoder_needs_a_model_and_data(task: str) -> None:
    assert broken(task=task, data=SOURCE) == []
    assert broken(task=task) == ["task"]
    assert broken(task=task, data=SOURCE, model={}) == ["task"]


@pytest.mark.parametrize(
    ("task", "sections", "key"),
    [
        ("causal-lm", {"train": {"samples_per_step": 8}}, "train.samples_per_step"),
        ("causal-lm", {"data": {**SOURCE, "doc_stride": 64}}, "data.doc_stride"),
        ("causal-lm", {"model": {"name": "x", "labels": 3}}, "model.labels"),
        ("question-answering", {"train": {"tokens_per_step": 4096}}, "train.tokens_per_step"),
        ("question-answering", {"data": {**SOURCE, "label_column": "y"}}, "data.label_column"),
        ("question-answering", {"data": {**SOURCE, "doc_stride": 512}}, "data.doc_stride"),
        ("question-answering", {"sample": {"prompt": "Who?"}}, "sample.prompt"),
        ("sequence-classification", {"evaluation": {"n_best": 5}}, "evaluation.n_best"),
        ("sequence-classification", {"data": {**SOURCE, "text_columns": ["a", "a"]}}, "data.text_columns"),
        ("sequence-classification", {"model": {"name": "x", "labels": ["no", "yes", "no"]}}, "model.labels"),
        ("sequence-classification", {"data": {**SOURCE, "learn": "all"}}, "data.learn"),
        ("sequence-classification", {"sample": {"prompt": "x", "context": "y"}}, "sample.context"),
    ],
)
def test_what_a_task_does_not_read_is_refused(task: str, sections: dict[str, Any], key: str) -> None:
    assert broken(**{"task": task, "data": SOURCE, **sections}) == [key]


def test_every_key_of_the_table_is_one() -> None:
    assert set(READ_BY) <= set(keys())


def test_a_task_of_another_package_may_read_any_key() -> None:
    config = RunConfig.model_construct(**{**RunConfig().__dict__, "task": "guest"})
    changed = config.model_copy(update={"train": config.train.model_copy(update={"samples_per_step": 8})})
    assert [breach.key for breach in breaches_of(changed, frozenset())] == ["train.steps"]
