"""How many rows examples become, for a plan: counted, or estimated from a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.encoder_work import questions_of, write_tokenizer

from coremill.config.schema import RunConfig
from coremill.data import counting_examples
from coremill.plan.types import RowCount
from coremill.tasks.base import make_task

LENGTH, COUNT = 96, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    write_tokenizer(folder)
    rows = [json.dumps(row) for row in questions_of(COUNT, 3, mean=70, longest=200)]
    (folder / "questions.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def config_of(folder: Path, task: str, **data: Any) -> RunConfig:
    named = (
        {"doc_stride": 24} if task == "question-answering" else {"text_columns": ["context"], "label_column": "kind"}
    )
    section = {"source": str(folder / "questions.jsonl"), "sequence_length": LENGTH, **named, **data}
    return RunConfig.model_validate({"task": task, "data": section})


def count(config: RunConfig, folder: Path, *, tokenizer: bool = True) -> RowCount:
    return make_task(config).count_rows(
        tokenizer_folder=folder if tokenizer else None,
        code_sha256=None,
        vocabulary_rows=30522,
        max_positions=512,
        cache=folder / "cache",
        progress=lambda _: None,
    )


def rows_of(config: RunConfig, folder: Path) -> Any:
    return make_task(config).make_rows(
        tokenizer_folder=folder,
        code_sha256=None,
        vocabulary_rows=30522,
        max_positions=512,
        cache=folder / "cache",
        progress=None,
    )


@pytest.mark.parametrize("task", ["question-answering", "sequence-classification"])
def test_few_examples_are_counted_as_training_finds_them(folder: Path, task: str) -> None:
    for fraction in (0.0, 0.2):
        config = config_of(folder, task, evaluation_fraction=fraction)
        counted, rows = count(config, folder), rows_of(config, folder)
        assert not counted.is_estimate and counted.rows == rows.train_rows
        assert counted.lengths is not None
        assert counted.lengths.mean == pytest.approx(rows.mean_row_tokens)
        assert counted.lengths.longest == rows.longest_row <= LENGTH
        assert rows.from_cache  # what the plan encoded, training finds
    windows = counted.rows if task == "question-answering" else None
    assert windows is None or windows > 0.8 * COUNT  # some contexts have several


@pytest.mark.parametrize("task", ["question-answering", "sequence-classification"])
def test_of_many_examples_a_sample_is_encoded(folder: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder, task, on_bad_rows="skip")  # other rows than above: not in the cache
    monkeypatch.setattr(counting_examples, "PACKED_NOW_BYTES", 0)
    monkeypatch.setattr(counting_examples, "SAMPLE_BYTES", 40_000)
    guessed = count(config, folder)
    assert guessed.is_estimate and guessed.rows is not None and guessed.lengths is not None
    assert not any((folder / "cache" / "data").glob("*/partial*"))
    counted = rows_of(config, folder)
    assert guessed.rows == pytest.approx(counted.train_rows, rel=0.1)
    assert guessed.lengths.mean == pytest.approx(counted.mean_row_tokens, rel=0.1)
    assert guessed.lengths.longest == LENGTH and "a sample of 40" in guessed.words
    # Once they are encoded they are counted.
    assert count(config, folder).rows == counted.train_rows


def test_without_a_tokenizer_nothing_is_known(folder: Path) -> None:
    found = count(config_of(folder, "question-answering"), folder, tokenizer=False)
    assert found.rows is None and found.words.startswith("not known")
