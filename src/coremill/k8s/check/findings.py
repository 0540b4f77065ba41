"""What a check finds: values that pass from the checks to the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One thing wrong at one field, as a check that sees a single object knows it."""

    path: str  # spec.template.spec.requirements[3].values; empty: the whole object
    rule: (
        str  # what kind of problem: unknown-field, required, type, value, too-long, too-many, duplicate, name, cel, ...
    )
    text: str
    fix: str
    level: Level = "error"


@dataclass(frozen=True)
class Finding:
    """A problem with where it is: the file and line, the object."""

    file: str
    line: int | None  # from 1; None: the object was rendered, and stands in no file
    object: str  # NodePool/cpu-amx
    problem: Problem

    def __str__(self) -> str:
        field = f" {self.problem.path}" if self.problem.path else ""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        where = f"{place}: {self.problem.level}: {self.object}{field}"
        return f"{where}: {self.problem.text}; {self.problem.fix} [{self.problem.rule}]"

    def to_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "file": self.file,
            "line": self.line,
            "object": self.object,
            "field": problem.path,
            "level": problem.level,
            "rule": problem.rule,
            "problem": problem.text,
            "fix": problem.fix,
        }


def joined(path: str, key: str | int) -> str:
    """A path with one more part, as kubectl writes it; keys that hold dots or slashes stand in brackets."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    plain = key.replace("-", "").replace("_", "").isalnum()
    return f"{path}.{key}".lstrip(".") if plain else f"{path}[{key}]"


def shown(value: Any) -> str:
    """A value as a message shows it: short."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'}"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
