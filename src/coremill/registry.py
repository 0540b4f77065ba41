"""What can be added without a change in here: engines and tasks, by the name a run file calls them.

Ours are named below, by where they are; nothing else in coremill knows their names. Other packages register theirs as
entry points of the same groups, and so the run file's schema, the plan, the fork server and ranks under any launcher
find them. What a name stands for is importable without torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from coremill.errors import InputError

Group = Literal["coremill.engines", "coremill.tasks"]

BUILT_IN: Mapping[Group, Mapping[str, str]] = {
    "coremill.engines": {
        "replicate": "coremill.engines.replicate:Replicate",
        "shard": "coremill.engines.shard:Shard",
    },
    "coremill.tasks": {
        "causal-lm": "coremill.tasks.causal_lm:CausalLm",
        "question-answering": "coremill.tasks.question_answering:QuestionAnswering",
        "sequence-classification": "coremill.tasks.sequence_classification:SequenceClassification",
    },
}


@functools.cache
def _guests(group: Group) -> dict[str, EntryPoint]:
    """Of other packages; a name of ours stays ours."""
    found = {point.name: point for point in entry_points(group=group)}
    return {name: found[name] for name in sorted(found) if name not in BUILT_IN[group]}


def names(group: Group) -> tuple[str, ...]:
    """What may stand in a run file: ours in their order, then guests by name."""
    return (*BUILT_IN[group], *_guests(group))


@functools.cache
def find(group: Group, name: str) -> Any:
    """What a name stands for: a class or value that imports no torch."""
    if name in BUILT_IN[group]:
        module, _, attribute = BUILT_IN[group][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    point = _guests(group)[name]
    try:
        return point.load()
    except Exception as error:  # whatever other people's modules raise
        package = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
        raise InputError(
            f"{name} is registered, but cannot be imported",
            where=f"entry point {point.value}{package}",
            why=f"{type(error).__name__}: {error}",
            do="repair or remove that package, or name another one of " + ", ".join(BUILT_IN[group]),
        ) from error


def importable(group: Group) -> dict[str, Any]:
    """All there are, by name, less guests that cannot be imported: only a run that names one hears of it."""
    found: dict[str, Any] = {}
    for name in names(group):
        with contextlib.suppress(InputError):
            found[name] = find(group, name)
    return found
