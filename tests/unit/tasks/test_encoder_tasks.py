"""The halves of encoders' tasks without torch: which models, which labels, which rows of an evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coremill.config.schema import RunConfig
from coremill.data.labels import Labels
from coremill.errors import InputError
from coremill.tasks.base import make_task
from coremill.tasks.question_answering.scoring import rows_of_whole_questions
from coremill.tasks.sequence_classification.head_labels import labels_of_head

TASKS = ("question-answering", "sequence-classification")


def check(task: str, **config: Any) -> None:
    named = {"model": {"name": "x"}, "task": task, "data": {"source": "x.jsonl"}}
    made = make_task(RunConfig.model_validate(named))
    made.check_model(config, description="the model", where="config.json", trusted=False)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "family", ["bert", "distilbert", "roberta", "electra", "deberta-v2", "modernbert", "xlm-roberta"]
)
def test_encoders_are_taken(task: str, family: str) -> None:
    check(task, model_type=family)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, "is a decoder"),
        ({"model_type": "gpt2"}, "is a decoder"),
        ({"model_type": "bert", "is_decoder": True}, "is a decoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "with a decoder"),
        ({"model_type": "vit"}, "not a model that transformers knows for"),
    ],
)
def test_others_are_refused(task: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check(task, **config)


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({"architectures": ["BertForMaskedLM"]}, None),
        ({}, None),
        ({"architectures": ["BertForSequenceClassification"]}, Labels(kind="classes", count=2)),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"1": "b", "0": "a", "2": "c"}},
            Labels(kind="classes", count=3, names=("a", "b", "c")),
        ),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
            Labels(kind="regression"),
        ),
    ],
)
def test_labels_of_a_head(config: dict[str, Any], labels: Labels | None) -> None:
    assert labels_of_head(config) == labels


def asked_of(labels: Any, *names: str) -> Any:
    """What `model.labels` asks for of a head with these names."""
    named = {"model": {"name": "x", "labels": labels}, "task": TASKS[1], "data": {"source": "x.jsonl"}}
    head = {"architectures": ["BertForSequenceClassification"], "id2label": dict(enumerate(names))}
    asked: Any = make_task(RunConfig.model_validate(named)).on_model(head, pretrained=True)
    return asked.asked_labels()


def test_names_for_the_classes_of_a_head() -> None:
    assert asked_of(None, "NO", "YES").labels.names == ("NO", "YES")
    assert asked_of(["no", "yes"], "NO", "YES").labels.names == ("no", "yes")
    assert asked_of(["neg", "pos"], "NO", "YES").labels.names == ("neg", "pos")
    assert asked_of(["yes", "no", "maybe"], "NO", "YES").labels.count == 3  # a new head
    with pytest.raises(InputError, match="in another order") as error:
        asked_of(["yes", "no"], "NO", "YES")
    assert "NO, YES" in str(error.value.why)
    assert asked_of(None, "same", "same").labels == Labels(kind="classes", count=2)


def test_an_evaluation_takes_whole_questions() -> None:
    windows = np.repeat(np.arange(50), np.random.default_rng(0).integers(1, 6, 50))
    assert len(rows_of_whole_questions(windows, None)) == len(windows)
    for most in (1, 7, 40, 100, len(windows)):
        rows = rows_of_whole_questions(windows, most)
        taken = np.unique(windows[rows])
        assert np.array_equal(rows, np.flatnonzero(np.isin(windows, taken)))
        assert len(rows) <= most or len(taken) == 1
