"""A plan read back from its JSON form: the launcher writes plan.json, the ranks it starts follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from coremill.plan.types import (
    Choice,
    FullTraining,
    MemoryPart,
    MemoryPlan,
    Plan,
    Remedy,
    RowLengths,
    SavePlan,
    StepSeconds,
)


def plan_from_json(document: Mapping[str, Any]) -> Plan:
    """The inverse of `Plan.to_json`."""
    values: dict[str, Any] = {}
    for field in fields(Plan):
        if field.name == "memory":
            phases = {name: _read(MemoryPart, phase) for name, phase in document["memory_by_phase"].items()}
            values["memory"] = MemoryPlan(**phases, limit=document["memory_bytes_per_rank"]["limit"])
        elif field.name == "step_seconds":
            values["step_seconds"] = _read(StepSeconds, document["step_seconds"])
        elif field.name == "save":
            values["save"] = _read(SavePlan, document["save"]) if document.get("save") else None
        elif field.name == "full_training":
            full = document.get("full_training")
            values["full_training"] = _read(FullTraining, full) if full else None
        elif field.name == "row_lengths":
            lengths = document.get("row_lengths")
            values["row_lengths"] = _read(RowLengths, lengths) if lengths else None
        elif field.name == "remedies":
            values["remedies"] = tuple(_read(Remedy, remedy) for remedy in document["remedies"])
        elif field.name in document or field.default is MISSING:  # a plan of an earlier version lacks some
            values[field.name] = _plain(document[field.name])
    return Plan(**values)


def _read(kind: Any, document: Mapping[str, Any]) -> Any:
    return kind(**{field.name: _plain(document[field.name]) for field in fields(kind)})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"value", "reason"}:
        return Choice(value["value"], value["reason"])
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return value
