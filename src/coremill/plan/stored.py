"""A plan read back from its JSON form: the launcher writes plan.json, the ranks it starts follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from coremill.plan.saving import save_from_json
from coremill.plan.types import Choice, MemoryPart, MemoryPlan, Plan, Remedy, StepSeconds


def plan_from_json(document: Mapping[str, Any]) -> Plan:
    """The inverse of `Plan.to_json`."""
    values: dict[str, Any] = {}
    for field in fields(Plan):
        if field.name == "memory":
            values["memory"] = _memory(document)
        elif field.name == "step_seconds":
            values["step_seconds"] = _only_fields(StepSeconds, document["step_seconds"])
        elif field.name == "save":
            values["save"] = save_from_json(document["save"]) if document.get("save") else None
        elif field.name == "remedies":
            values["remedies"] = tuple(_remedy(remedy) for remedy in document["remedies"])
        elif field.name in document or field.default is MISSING:  # a plan of an earlier version lacks some
            values[field.name] = _plain(document[field.name])
    return Plan(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"value", "reason"}:
        return Choice(value["value"], value["reason"])
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return value


def _only_fields(kind: Any, document: Mapping[str, Any]) -> Any:
    return kind(**{field.name: document[field.name] for field in fields(kind)})


def _memory(document: Mapping[str, Any]) -> MemoryPlan:
    phases = document["memory_by_phase"]
    parts = {phase: _only_fields(MemoryPart, phases[phase]) for phase in phases}
    return MemoryPlan(**parts, limit=document["memory_bytes_per_rank"]["limit"])


def _remedy(document: Mapping[str, Any]) -> Remedy:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    return Remedy(**values)
