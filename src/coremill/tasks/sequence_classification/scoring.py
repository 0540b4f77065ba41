"""What the logits of an evaluation come to: metrics, and the predictions file. Without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coremill.data.encoded import EncodedRows
from coremill.data.encoded_split import EncodedSplit
from coremill.data.order import Positions
from coremill.tasks.base import Scored
from coremill.tasks.sequence_classification.classification_metrics import accuracy, f1, pearson, spearman

PREDICTIONS_FILE = "predictions.json"


def score_rows(rows: EncodedRows, row_ids: Positions, logits: npt.NDArray[np.float32]) -> Scored:
    """Of these rows of the evaluation, [rows, labels]."""
    assert rows.labels is not None
    split = EncodedSplit(rows, "evaluation")
    right = split.targets["labels"][row_ids]
    origins = [(rows.evaluation_files[file], row) for file, row in split.origins(row_ids).tolist()]
    if rows.labels.kind == "regression":
        numbers = logits[:, 0].astype(np.float64)
        metrics = {"pearson": pearson(numbers, right), "spearman": spearman(numbers, right)}
        return Scored(metrics, _file(origins, numbers.tolist(), right.tolist(), []))
    classes = logits.argmax(axis=1)
    metrics = {"accuracy": accuracy(classes, right), "f1": f1(classes, right, classes=rows.labels.count)}
    names: Sequence[str | int] = rows.labels.names or range(rows.labels.count)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float64)
    certain = (shares.max(axis=1) / shares.sum(axis=1)).tolist()
    predicted, labels = ([names[each] for each in side.tolist()] for side in (classes, right))
    return Scored(metrics, _file(origins, predicted, labels, certain))


def label_in_words(rows: EncodedRows, split: EncodedSplit, row: int) -> str:
    """Of one row, for people."""
    assert rows.labels is not None
    value = split.targets["labels"][row].item()
    return f"label {rows.labels.names[value] if rows.labels.names else format(value, 'g')}"


def _file(
    origins: Sequence[tuple[str, int]], predicted: list[Any], right: list[Any], certain: list[float]
) -> dict[str, str]:
    """A line a row: where it comes from, what was said, what is right, and how sure the model was."""
    lines = [
        {"file": file, "row": row, "predicted": ours, "label": theirs}
        | ({"probability": certain[at]} if certain else {})
        for at, ((file, row), ours, theirs) in enumerate(zip(origins, predicted, right, strict=True))
    ]
    return {PREDICTIONS_FILE: "[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n"}
