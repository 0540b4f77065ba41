from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coremill.config.schema import RunConfig
from coremill.data.encoded import EncodedRows
from coremill.data.encoded_split import EncodedSplit
from coremill.tasks.base import ShownRow, make_task
from pair_tokenizers import make_bert_tokenizer


def shown(
    tmp_path: Path, task: str, lines: list[dict[str, Any]], *, evaluation: bool = False, **data: Any
) -> tuple[list[ShownRow], EncodedRows]:
    source = tmp_path / "set.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = {"source": str(source), "sequence_length": 24, **data}
    config = RunConfig.model_validate({"task": task, "data": section, "train": {"samples_per_step": 4}})
    rows = make_task(config).make_rows(
        tokenizer_folder=make_bert_tokenizer(tmp_path / "tokenizer"),
        code_sha256=None,
        vocabulary_rows=400,
        max_positions=64,
        cache=tmp_path / "cache",
        progress=None,
    )
    return list(make_task(config).shown_rows(rows, count=50, evaluation=evaluation)), rows


@pytest.mark.parametrize("evaluation", [False, True])
def test_texts_with_their_labels(tmp_path, evaluation):
    lines = [{"text": f"the mill {'turns ' * row}", "label": ("old", "new")[row % 2]} for row in range(12)]
    fraction = {"evaluation_fraction": 0.25} if evaluation else {}
    found, rows = shown(tmp_path, "sequence-classification", lines, evaluation=evaluation, **fraction)
    assert sorted(row.row for row in found) == list(range(3 if evaluation else 12))
    split = EncodedSplit(rows, "evaluation" if evaluation else "train")
    for row in found:
        assert row.summary == f"label {('new', 'old')[split.targets['labels'][row.row]]}"
        assert list(row.ids) == split.padded(np.array([row.row]))[0][0].tolist() and not any(row.learned)


def test_windows_with_their_answers(tmp_path):
    context = "the mill turns and the store holds " * 3 + "what the mill has ground"
    answers = {"text": ["ground"], "answer_start": [context.index("ground")]}
    none: dict[str, list[Any]] = {"text": [], "answer_start": []}
    lines = [
        {"id": f"q{row}", "question": "what", "context": context, "answers": answers if row % 2 else none}
        for row in range(4)
    ]
    found, rows = shown(tmp_path, "question-answering", lines, doc_stride=6)
    assert len(found) == rows.train_rows >= 8
    words = {row.summary for row in found}
    assert "window 2 of 2 of question q1" in words
    assert "window 1 of 2 of question q1, whose answer is not in it" in words
    assert "window 1 of 2 of question q2, which has no answer" in words
    for row in found:
        marked = [at for at, learned in enumerate(row.learned) if learned]
        assert (marked == [0]) == ("answer" in row.summary)  # the token that stands for none
