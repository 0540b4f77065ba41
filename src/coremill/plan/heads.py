"""What stands behind a model's layers where no words are predicted: the heads of transformers' auto classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_LABELS = 2  # of transformers


@dataclass(frozen=True)
class TaskHead:
    """A few numbers in place of one for each word."""

    outputs: int
    pools: bool  # one vector of a row goes through a map of its own first, and the outputs are made of that


def head_of(model_class: str, config: Mapping[str, Any], labels: int | None = None) -> TaskHead | None:
    """The head that a class gives a model; None: a number for each word. `labels`: how many, where the run says so."""
    if model_class == "AutoModelForQuestionAnswering":
        return TaskHead(2, pools=False)  # where an answer begins and ends, at each token
    if model_class == "AutoModelForSequenceClassification":
        return TaskHead(labels or _labels_of(config), pools=True)
    return None


def _labels_of(config: Mapping[str, Any]) -> int:
    """As the config has it: a number, or names."""
    if isinstance(names := config.get("id2label"), Mapping) and names:
        return len(names)
    count = config.get("num_labels")
    return count if isinstance(count, int) and count > 0 else DEFAULT_LABELS
