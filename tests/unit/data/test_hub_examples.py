"""Examples from datasets of the hub: splits, the names of classes, answers as the hub keeps them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import hub_stand_in
import huggingface_hub.constants
import pytest

from coremill.config.schema import RunConfig
from coremill.data.encode import prepare_examples
from coremill.data.encoded import EncodedRows
from coremill.data.encoded_split import EncodedSplit
from coremill.data.examples import ExampleForm, labelled_texts, questions_of
from pair_tokenizers import make_bert_tokenizer

CARD = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: train.parquet}
  - {split: validation, path: validation.parquet}
---
"""
PAIRS = labelled_texts(("sentence1", "sentence2"), "label")
QUESTIONS = questions_of(question="question", context="context", answers="answers", id_column="id")


def parquet(rows: list[dict[str, Any]], features: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(sink)
    return sink.getvalue()


def pairs(count: int) -> bytes:
    text = datasets.Value("string")
    features = {"sentence1": text, "sentence2": text}
    rows = [{"sentence1": f"mill {row}", "sentence2": "a store", "label": row % 2} for row in range(count)]
    return parquet(rows, features | {"label": datasets.ClassLabel(names=["not_equivalent", "equivalent"])})


def questions(count: int) -> bytes:
    text = datasets.Value("string")
    rows = []
    for row in range(count):
        answers = {"text": ["mill"], "answer_start": [4]} if row % 2 else {"text": [], "answer_start": []}
        rows.append({"id": f"q{row}", "question": "what turns?", "context": "the mill turns", "answers": answers})
    listed = {"text": datasets.List(text), "answer_start": datasets.List(datasets.Value("int32"))}
    return parquet(rows, {"id": text, "question": text, "context": text, "answers": listed})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    sets = {"some/mrpc": pairs, "some/squad": questions}
    files = {
        name: {"README.md": CARD, "train.parquet": make(12), "validation.parquet": make(6)}
        for name, make in sets.items()
    }
    home = tmp_path_factory.mktemp("hf")
    hub = hub_stand_in.Hub(files)
    with hub_stand_in.serve(hub), pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setenv("HF_ENDPOINT", hub.address)
        patch.setenv("HF_HOME", str(home))
        yield


def prepared(name: str, form: ExampleForm, tmp_path: Path) -> EncodedRows:
    data = {"source": name, "evaluation_split": "validation", "sequence_length": 32}
    return prepare_examples(
        RunConfig.model_validate({"data": data}),
        form=form,
        doc_stride=4,
        tokenizer_folder=make_bert_tokenizer(tmp_path / "tokenizer"),
        vocabulary_rows=400,
        max_positions=None,
        cache=tmp_path / "cache",
    )


def test_classes_are_named_as_the_dataset_names_them(served: None, tmp_path: Path) -> None:
    rows = prepared("hf://some/mrpc", PAIRS, tmp_path)
    assert rows.labels is not None and rows.labels.names == ("not_equivalent", "equivalent")
    assert (rows.train_rows, rows.evaluation_rows) == (12, 6)
    assert EncodedRows.from_json(rows.to_json()).commits == {"hf://some/mrpc": hub_stand_in.COMMIT}
    assert EncodedSplit(rows, "evaluation").targets["labels"].tolist() == [0, 1, 0, 1, 0, 1]


def test_answers_as_the_hub_keeps_them(served: None, tmp_path: Path) -> None:
    rows = prepared("hf://some/squad", QUESTIONS, tmp_path)
    split = EncodedSplit(rows, "evaluation")
    assert [question.answers for question in split.questions()] == [(), ("mill",)] * 3
    assert rows.unanswerable == 6 + 3
