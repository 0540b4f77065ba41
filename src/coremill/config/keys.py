"""The schema's keys in the user's words: what a key takes, its default, what it is for.

Made from the JSON Schema of `RunConfig`, so there is one definition; messages and `docs/config.md` read it from here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from coremill.config.schema import RunConfig

TOP = ""
"""The name of the top level among the sections."""


@dataclass(frozen=True)
class Key:
    """One setting: where it stands, what it takes, what it means."""

    name: str
    section: str
    choices: tuple[str, ...]
    kinds: frozenset[str]  # of 'integer', 'number', 'boolean', 'string', 'array', 'object', 'null'
    bounds: Mapping[str, float]  # JSON Schema's names: minimum, exclusiveMinimum, maximum, exclusiveMaximum
    default: Any
    description: str
    form: str | None = None  # of a text or list that has one, in words
    inside: tuple[Key, ...] = ()  # of a list of mappings: the keys of one
    item_choices: tuple[str, ...] = ()  # of a list of words: those it may hold
    is_required: bool = False

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def is_text(self) -> bool:
        """Takes any text, and nothing that looks like another kind."""
        return "string" in self.kinds and self.kinds <= {"string", "null"}

    @property
    def takes(self) -> str:
        """What may be written, in words: `auto or a whole number above 0`."""
        several = "one of " if len(self.choices) > 1 else ""
        parts = [several + ", ".join(self.choices)] if self.choices else []
        kinds = {
            "integer": "a whole number" + self._range(),
            "number": "a number" + self._range(),
            "boolean": "true or false",
            "string": self.form or "text",
            "array": self.form or "a list",
            "object": "a mapping",
            "null": "null",
        }
        parts += [words for kind, words in kinds.items() if kind in self.kinds]
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"

    def in_range(self, value: float) -> bool:
        bounds = self.bounds
        return (
            math.isfinite(value)
            and value >= bounds.get("minimum", -math.inf)
            and value > bounds.get("exclusiveMinimum", -math.inf)
            and value <= bounds.get("maximum", math.inf)
            and value < bounds.get("exclusiveMaximum", math.inf)
        )

    def _range(self) -> str:
        words = {"exclusiveMinimum": "above", "minimum": "of at least"}
        words |= {"exclusiveMaximum": "below", "maximum": "of at most"}
        said = [f"{word} {_exactly(self.bounds[name])}" for name, word in words.items() if name in self.bounds]
        return f" {' and '.join(said)}" if said else ""


def _exactly(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"


@functools.cache
def raw_schema() -> dict[str, Any]:
    """pydantic's JSON Schema of a run file; 50 ms to make, so only once and only when needed."""
    return RunConfig.model_json_schema()


@functools.cache
def sections() -> Mapping[str, str]:
    """Section name -> its one-line description, the top level (`TOP`) first."""
    found = {TOP: "The top level of a run file."}
    for name, rules in raw_schema()["properties"].items():
        target = _section_of(rules)
        if target is not None:
            found[name] = raw_schema()["$defs"][target]["description"]
    return found


@functools.cache
def keys() -> Mapping[str, Key]:
    """Every setting by its dotted name, in the order of the schema. Sections themselves are not in it."""
    schema, found = raw_schema(), []
    for name, rules in schema["properties"].items():
        target = _section_of(rules)
        if target is None:
            found.append(_key(name, TOP, rules))
        else:
            inside = schema["$defs"][target]["properties"].items()
            found += [_key(inner, name, inner_rules) for inner, inner_rules in inside]
    return {key.dotted: key for key in found}


def names_in(section: str) -> tuple[str, ...]:
    """What may be written at this level: its keys and, at the top, the sections."""
    own = tuple(key.name for key in keys().values() if key.section == section)
    return own if section else tuple(raw_schema()["properties"])


def _section_of(rules: Mapping[str, Any]) -> str | None:
    """The name of the section's class, also where a short form is allowed beside it (`model: id`)."""
    for part in (rules, *rules.get("anyOf", ())):
        if "$ref" in part:
            return str(part["$ref"]).rpartition("/")[2]
    return None


def _key(name: str, section: str, rules: Mapping[str, Any]) -> Key:
    choices: list[str] = []
    kinds: set[str] = set()
    bounds: dict[str, float] = {}
    inside: tuple[Key, ...] = ()
    item_choices: list[str] = []
    for part in rules.get("anyOf", (rules,)):
        listed = part.get("enum", [part["const"]] if "const" in part else [])
        choices += listed
        if not listed:
            kinds.add(part["type"])
        item_choices += part.get("items", {}).get("enum", [])
        target = _section_of(part.get("items", {}))
        if target is not None:
            inside = _keys_of_item(raw_schema()["$defs"][target], f"{section}.{name}[]")
        bounds |= {word: part[word] for word in part if word.lower().endswith(("minimum", "maximum"))}
    default, description, form = rules.get("default"), rules.get("description", ""), rules.get("x-form")
    key = Key(name, section, tuple(choices), frozenset(kinds), bounds, default, description, form, inside)
    return replace(key, item_choices=tuple(item_choices))


def _keys_of_item(rules: Mapping[str, Any], section: str) -> tuple[Key, ...]:
    found = (_key(name, section, inner) for name, inner in rules["properties"].items())
    return tuple(replace(key, is_required=key.name in rules.get("required", ())) for key in found)
