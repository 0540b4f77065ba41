"""A value against a schema, as the API server has it: unknown fields refused, all problems at once.

Schemas are those of a CustomResourceDefinition (openAPIV3Schema) or of core kinds (with references into definitions).
What differs from plain JSON Schema: int-or-string, nullable, preserve-unknown-fields, embedded resources, lists that
are maps or sets; a keyword counts only for values of its type (Karpenter's CRD has a `pattern` on a list: nobody reads
it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from coremill.k8s.check.findings import Problem, joined, shown
from coremill.k8s.check.formats import FORMATS, INTEGER_RANGES
from coremill.nearby import nearest

Schema = Mapping[str, Any]
# As the API server has it: after one of these it does not evaluate CEL rules, since they could not be trusted.
BLOCKING = frozenset({"required", "type", "too-long", "too-many"})
_INT_OR_STRING = "x-kubernetes-int-or-string"
_PRESERVE = "x-kubernetes-preserve-unknown-fields"
# What an object inside an object has besides the fields its schema names.
_EMBEDDED: Schema = {
    "apiVersion": {"type": "string", "minLength": 1},
    "kind": {"type": "string", "minLength": 1},
    "metadata": {"type": "object", _PRESERVE: True},
}
_KNOWN_SHOWN = 8
# Core kinds have no pattern for it: the API server reads it and refuses.
_QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?(\d+(\.\d*)?|\.\d+))?\Z", re.ASCII)
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "number": (int, float),
    "null": (type(None),),
}


@dataclass(frozen=True)
class Structure:
    """Validates values; `definitions` are what `$ref` leads to."""

    definitions: Mapping[str, Schema] = field(default_factory=dict)
    is_core: bool = (
        False  # a core kind: objects without named fields are open, and lists are not searched for duplicates
    )

    def problems(self, value: Any, schema: Schema, path: str = "") -> Iterator[Problem]:
        if isinstance(value, str) and schema.get("$ref", "").endswith(".Quantity") and not _QUANTITY.match(value):
            yield Problem(path, "value", f"{shown(value)} is no quantity", "write it like 30, 500m or 54Gi")
        schema = self.resolved(schema)
        if value is None and _may_be_null(schema):
            return
        if not _type_fits(value, schema):
            wanted = _type_words(schema)
            yield Problem(path, "type", f"{shown(value)} where {wanted} belongs", _type_fix(value, wanted))
            return
        yield from _choices(value, schema, path)
        if isinstance(value, dict):
            yield from self._object_problems(value, schema, path)
        elif isinstance(value, list):
            yield from self._list_problems(value, schema, path)
        elif isinstance(value, str):
            yield from _string_problems(value, schema, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield from _number_problems(value, schema, path)
        yield from self._combination_problems(value, schema, path)

    def resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self.definitions[schema["$ref"].rsplit("/", 1)[-1]]
        return schema

    def _object_problems(self, value: dict[str, Any], schema: Schema, path: str) -> Iterator[Problem]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if schema.get("x-kubernetes-embedded-resource"):
            properties, required = {**_EMBEDDED, **properties}, dict.fromkeys(("apiVersion", "kind", *required))
        for key in required:
            if key not in value:
                yield Problem(joined(path, key), "required", "missing", f"set it: {_described(properties.get(key))}")
        yield from _count_problems(len(value), schema, path, "Properties", "entries")
        extra = schema.get("additionalProperties")
        for key, one in value.items():
            where = joined(path, key)
            if key in properties:
                yield from self.problems(one, properties[key], where)
            elif isinstance(extra, Mapping):
                yield from self.problems(one, extra, where)
            elif not is_open(schema) and not (self.is_core and not properties):
                yield Problem(where, "unknown-field", "unknown field", known_fields(key, properties))

    def _list_problems(self, value: list[Any], schema: Schema, path: str) -> Iterator[Problem]:
        yield from _count_problems(len(value), schema, path, "Items", "items")
        items = schema.get("items")
        if items is not None:
            for index, one in enumerate(value):
                yield from self.problems(one, items, joined(path, index))
        if not self.is_core:
            yield from _duplicates(value, schema, path)

    def _combination_problems(self, value: Any, schema: Schema, path: str) -> Iterator[Problem]:
        """allOf, anyOf, oneOf and not hold further conditions on the value, never further fields."""

        def holds(part: Schema) -> bool:
            return not any(True for each in self.problems(value, part, path) if each.rule != "unknown-field")

        for part in schema.get("allOf", ()):
            yield from (each for each in self.problems(value, part, path) if each.rule != "unknown-field")
        if "anyOf" in schema and not schema.get(_INT_OR_STRING) and not any(map(holds, schema["anyOf"])):
            yield Problem(path, "value", f"{shown(value)} fits none of the forms allowed", "see the schema's anyOf")
        if "oneOf" in schema and (count := sum(map(holds, schema["oneOf"]))) != 1:
            yield Problem(path, "value", f"{shown(value)} fits {count} of the forms allowed", "make it fit exactly one")
        if "not" in schema and holds(schema["not"]):
            yield Problem(path, "value", f"{shown(value)} is a form that is forbidden here", "see the schema's not")


def is_open(schema: Schema) -> bool:
    """Whether an object may hold what its schema does not name."""
    return bool(
        schema.get(_PRESERVE)
        or schema.get("additionalProperties")
        or ("properties" not in schema and "type" not in schema)
    )


def known_fields(key: str, properties: Mapping[str, Any]) -> str:
    """What to write instead of a field that is not known."""
    near = nearest(key, properties)
    if near is None:
        near = next((each for each in properties if each.lower() == key.lower()), None)
    if near is not None:
        return f"did you mean {near}?"
    names = sorted(properties)
    more = f" and {len(names) - _KNOWN_SHOWN} more" if len(names) > _KNOWN_SHOWN else ""
    return f"remove it; known here: {', '.join(names[:_KNOWN_SHOWN])}{more}" if names else "remove it"


@cache
def go_pattern(pattern: str) -> re.Pattern[str]:
    """Go's meaning of a pattern: classes are ASCII, and `$` is the end of the text, not also before a last newline."""
    return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", pattern), re.ASCII)


def _may_be_null(schema: Schema) -> bool:
    kinds = schema.get("type")
    return bool(schema.get("nullable")) or kinds is None or (isinstance(kinds, list) and "null" in kinds)


def _type_fits(value: Any, schema: Schema) -> bool:
    if schema.get(_INT_OR_STRING):
        return isinstance(value, str) or (_is_integer(value) and not isinstance(value, bool))
    kinds = schema.get("type")
    if kinds is None:
        return value is not None or bool(schema.get("nullable")) or _PRESERVE in schema
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if isinstance(value, bool):
            if kind == "boolean":
                return True
        elif kind == "integer":
            if _is_integer(value):
                return True
        elif isinstance(value, _TYPES[kind]):
            return True
    return False


def _is_integer(value: Any) -> bool:
    """As JSON has it: 3.0 is one; beyond 64 bits nothing is."""
    low, high = INTEGER_RANGES["int64"]
    return isinstance(value, int | float) and low <= value <= high and value == int(value)


def _type_words(schema: Schema) -> str:
    if schema.get(_INT_OR_STRING):
        return "an integer or a string"
    kinds = schema.get("type") or "a value"
    words = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    return " or ".join(("an " if word[0] in "aeiou" else "a ") + word for word in words)


def _type_fix(value: Any, wanted: str) -> str:
    if isinstance(value, int | float) and "string" in wanted:
        return f'put it in quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    if isinstance(value, str) and "integer" in wanted and value.lstrip("-").isdigit():
        return f"without quotes: {value}"
    if value is None:
        return "give it a value or remove it"
    return f"write {wanted}"


def _described(schema: Schema | None) -> str:
    if not schema:
        return "it is required"
    words = _type_words(schema) if "type" in schema or _INT_OR_STRING in schema else "a value"
    return f"one of {', '.join(map(str, schema['enum']))}" if "enum" in schema else words


def _choices(value: Any, schema: Schema, path: str) -> Iterator[Problem]:
    choices = schema.get("enum")
    if choices is not None and value not in choices:
        near = nearest(value, [each for each in choices if isinstance(each, str)]) if isinstance(value, str) else None
        listed = ", ".join(map(str, choices))
        yield Problem(
            path, "value", f"{shown(value)} is none of {listed}", f"did you mean {near}?" if near else "choose one"
        )


def _count_problems(count: int, schema: Schema, path: str, noun: str, words: str) -> Iterator[Problem]:
    low, high = schema.get(f"min{noun}"), schema.get(f"max{noun}")
    if low is not None and count < low:
        yield Problem(path, "value", f"{count} {words}", f"at least {low} needed")
    if high is not None and count > high:
        yield Problem(path, "too-many", f"{count} {words}", f"at most {high} allowed")


def _string_problems(value: str, schema: Schema, path: str) -> Iterator[Problem]:
    low, high = schema.get("minLength"), schema.get("maxLength")
    if low is not None and len(value) < low:
        yield Problem(path, "value", f"{shown(value)} has {len(value)} characters", f"at least {low} needed")
    if high is not None and len(value) > high:
        yield Problem(path, "too-long", f"{len(value)} characters", f"at most {high} allowed")
    pattern = schema.get("pattern")
    if pattern is not None and not go_pattern(pattern).search(value):
        yield Problem(path, "value", f"{shown(value)} does not match {pattern}", "write it in that form")
    form = schema.get("format")
    if form in FORMATS and not FORMATS[form](value):
        yield Problem(path, "type", f"{shown(value)} is no {form}", f"write a {form}")


def _number_problems(value: float, schema: Schema, path: str) -> Iterator[Problem]:
    low, high, step = schema.get("minimum"), schema.get("maximum"), schema.get("multipleOf")
    if low is not None and (value < low or (schema.get("exclusiveMinimum") is True and value == low)):
        yield Problem(path, "value", f"{value} is too small", f"at least {low}")
    if high is not None and (value > high or (schema.get("exclusiveMaximum") is True and value == high)):
        yield Problem(path, "value", f"{value} is too large", f"at most {high}")
    if step and value % step:
        yield Problem(path, "value", f"{value} is no multiple of {step}", f"round it to a multiple of {step}")
    form = schema.get("format")
    if form in INTEGER_RANGES and not INTEGER_RANGES[form][0] <= value <= INTEGER_RANGES[form][1]:
        yield Problem(path, "value", f"{value} is too large for {form}", f"at most {INTEGER_RANGES[form][1]}")


def _duplicates(value: list[Any], schema: Schema, path: str) -> Iterator[Problem]:
    kind = schema.get("x-kubernetes-list-type")
    keys = schema.get("x-kubernetes-list-map-keys", ())
    seen: set[str] = set()
    for index, one in enumerate(value):
        if kind == "map" and isinstance(one, dict):
            identity: Any = {key: one.get(key) for key in keys}
        elif kind == "set":
            identity = one
        else:
            continue
        mark = json.dumps(identity, sort_keys=True, default=str)
        if mark in seen:
            words = f"the same {' and '.join(keys)} as an earlier item" if kind == "map" else "stands in the list twice"
            yield Problem(joined(path, index), "duplicate", words, "keep one of them")
        seen.add(mark)
