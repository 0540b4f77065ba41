"""Values that a key cannot have: why, and the change most likely to make them right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coremill.config.foreign import LATER_VALUES
from coremill.config.keys import Key
from coremill.config.layers import Origin, Settings, said
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


def explain_items(
    key: Key, items: Sequence[Any], places: Sequence[Sequence[int | str]], settings: Settings
) -> list[InputError]:
    """What is wrong with mappings in a list, each thing once; a required key that is only misspelt is not missing."""
    names = {inner.name for inner in key.inside}
    misspelt = {place[0] for place in places if len(place) > 1 and place[1] not in names}
    found = []
    for place in dict.fromkeys(tuple(place[:2]) for place in places):
        item = items[int(place[0])]
        is_missing = len(place) > 1 and isinstance(item, Mapping) and place[1] in names and place[1] not in item
        if not (is_missing and place[0] in misspelt):
            found.append(_explain_item(key, item, place, settings))
    return found


def _explain_item(key: Key, item: Any, place: Sequence[int | str], settings: Settings) -> InputError:
    """`place`: its index and, where one is at fault, its key."""
    names, entry = [inner.name for inner in key.inside], f"{key.dotted}[{place[0]}]"
    whole = f"an entry has {', '.join(names)}"
    required = ", ".join(f"{inner.name}: ..." for inner in key.inside if inner.is_required)
    if not isinstance(item, Mapping):
        what = f"{entry} must be a mapping{' or text' if isinstance(item, str) else ''}, not {said(item)}"
        return InputError(what, where=settings.origin_of(entry).where(entry), why=whole, do=f"write {{{required}}}")
    name = str(place[1])
    dotted = f"{entry}.{name}"
    inner = next((each for each in key.inside if each.name == name), None)
    where = settings.origin_of(dotted if name in item else entry).where(dotted)
    if inner is None:
        close = nearest(name, names)
        do = f"did you mean {close}?" if close else "remove it"
        return InputError(f"unknown key {dotted}", where=where, why=whole, do=do)
    if name not in item:
        return InputError(f"{entry} has no {name}", where=where, why=inner.description, do=f"add {name}: ...")
    what = f"{dotted} must be {inner.takes}, not {said(item[name])}"
    return InputError(what, where=where, why=inner.description, do=_remedy(inner, item[name]))
