"""The labels of the head that a model comes with, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coremill.data.labels import Labels, listed
from coremill.errors import InputError

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
    unnamed = all(name == f"LABEL_{number}" for number, name in enumerate(names)) or len(set(names)) < len(names)
    return Labels(kind="classes", count=count, names=() if unnamed else tuple(names))


def refuse_other_order(named: Sequence[str], of_head: Labels) -> None:
    """Classes of a head in another order than its own: what it has learned of one would be said of another."""
    ours, own = ([name.casefold() for name in names] for names in (named, of_head.names))
    if ours != own and sorted(ours) == sorted(own):
        raise InputError(
            "model.labels has the classes of the model's head in another order",
            where="model.labels",
            why=f"its outputs are {listed(of_head.names)}, in this order",
            do="leave model.labels out, or write them in that order",
        )
