"""The labels of the head that a model comes with, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremill.data.labels import Labels

DEFAULT_CLASSES = 2  # of transformers, which leaves them out of the file


def labels_of_head(config: Mapping[str, Any]) -> Labels | None:
    """None: its files have no head for classes; a new one is drawn for those of the data."""
    built_as = config.get("architectures") or [""]
    if not str(built_as[0]).endswith("ForSequenceClassification"):
        return None
    named = config.get("id2label")
    names = [str(named[key]) for key in sorted(named, key=int)] if isinstance(named, Mapping) and named else []
    count = len(names) or int(config.get("num_labels") or DEFAULT_CLASSES)
    if config.get("problem_type") == "regression" or count == 1:
        return Labels(kind="regression")
    unnamed = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return Labels(kind="classes", count=count, names=() if unnamed else tuple(names))
