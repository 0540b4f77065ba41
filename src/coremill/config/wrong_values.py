"""A key that cannot have its value: why, in the words of the schema, and the change most likely to make it right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coremill.config.foreign import LATER_VALUES
from coremill.config.keys import Key
from coremill.config.layers import Origin, said
from coremill.config.unknown_keys import nearest
from coremill.errors import InputError


def explain_value(key: Key, value: Any, origin: Origin) -> InputError:
    """Why this key cannot have this value, in the words of the schema's descriptions."""
    where = origin.where(key.dotted)
    later = LATER_VALUES.get((key.dotted, value)) if isinstance(value, str) else None
    if later:
        why, instead = later
        return InputError(f"{key.dotted}: {value} is not in this release", where=where, why=why, do=f"use {instead}")
    what = f"{key.dotted} must be {key.takes}, not {said(value)}"
    return InputError(what, where=where, why=key.description, do=_remedy(key, value))


def _remedy(key: Key, value: Any) -> str:
    """The change most likely to make the value right."""
    numeric = key.kinds & {"integer", "number"}
    if value is None:
        return f"give a value, or remove it for the default ({_as_written(key.default)})"
    if isinstance(value, str):
        close = nearest(value.lower(), key.choices)
        if close:
            return f"did you mean {close}?"
        if "array" in key.kinds and value:
            return f"put it in brackets: {key.name}: [{value}]"
        if numeric:
            return f"remove the quotes: {value.strip()}" if _is_number(value) else "write digits, without unit or comma"
        if "boolean" in key.kinds:
            return "write true or false, without quotes"
        if key.form:
            return f"write {key.form}"
        if "string" in key.kinds:
            return "use characters that UTF-8 has" if value else "give a text that is not empty"
        return f"give {key.takes}"
    if isinstance(value, float) and "integer" in key.kinds and value.is_integer() and key.in_range(value):
        return f"write {int(value)}"
    if isinstance(value, (int, float)) and key.is_text:
        return "put it in quotes" + (f': "{_as_written(value)}"' if isinstance(value, int) else "")
    if isinstance(value, Mapping) and "object" in key.kinds:
        return f"use text for the keys inside {key.dotted}"
    return f"give {key.takes}"


def _as_written(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
