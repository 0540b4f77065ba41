"""A key that cannot have its value: why, in the words of the schema, and the change most likely to make it right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coremill.config.durations import durations_meant
from coremill.config.foreign import FOREIGN_VALUES, LATER_VALUES
from coremill.config.keys import Key
from coremill.config.layers import Origin, said
from coremill.config.translate import accepts, as_written, beside_word
from coremill.config.translate_adapters import ALL_LINEAR
from coremill.errors import InputError
from coremill.nearby import nearest

_TRUE, _FALSE = ("yes", "on", "y", "true", "1"), ("no", "off", "n", "false", "0")
_NOTHING = ("none", "null", "nil", "nan")
_THOUSANDS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def explain_value(key: Key, value: Any, origin: Origin) -> InputError:
    """Why this key cannot have this value, and what to write."""
    where = origin.where(key.dotted)
    if key.dotted == "lora.target_modules" and str(value).lower() in ALL_LINEAR:
        why = "without it every linear map of the layers gets an adapter, which is what this means elsewhere"
        return InputError(f"{key.dotted} takes names of modules, not {value}", where=where, why=why, do="remove it")
    later = LATER_VALUES.get((key.dotted, value.lower())) if isinstance(value, str) else None
    if later:
        why, instead = later
        return InputError(f"{key.dotted}: {value} is not in this release", where=where, why=why, do=f"use {instead}")
    wrong = [item for item in value if not accepts(key.dotted, [item])] if isinstance(value, list) else []
    if wrong and "array" in key.kinds and not key.inside:
        return _explain_list(key, value, wrong, where)
    what = f"{key.dotted} must be {key.takes}, not {said(value)}"
    return InputError(what, where=where, why=key.description, do=_remedy(key, value))


def _explain_list(key: Key, value: list[Any], wrong: list[Any], where: str) -> InputError:
    """A list with something in it that it does not take."""
    what = f"{key.dotted} must be {key.takes}, and has {', '.join(said(item) for item in wrong)} in it"
    if key.item_choices:
        return InputError(what, where=where, why=key.description, do=_words_meant(key, value))
    do = f"write [{', '.join(as_written(str(item)) if item not in wrong else repr(str(item)) for item in value)}]"
    return InputError(what, where=where, why=key.description, do=do)


def _words_meant(key: Key, value: list[Any]) -> str:
    """The list of words that was most likely meant."""
    if any(str(item).lower() == "all" for item in value):
        return f"write [{', '.join(key.item_choices)}], or those of them that are installed"
    meant = [nearest(str(item).lower(), key.item_choices) for item in value]
    known = list(dict.fromkeys(word for word in meant if word is not None))
    return f"write [{', '.join(known)}]" + ("" if known else f", or some of {', '.join(key.item_choices)}")


def value_meant(key: Key, value: Any) -> Any:
    """The value that the user most likely meant, which the key takes; None: nobody knows."""
    candidates = _candidates(key, value)
    return next((one for one in candidates if one is not None and accepts(key.dotted, one)), None)


def _candidates(key: Key, value: Any) -> list[Any]:
    found: list[Any] = [FOREIGN_VALUES.get(key.dotted, {}).get(str(value).lower())]
    if found[0] in ("true", "false") and "boolean" in key.kinds:
        found = [found[0] == "true"]
    if key.form:
        found += durations_meant(value)
    word = str(value).strip().lower()
    if "boolean" in key.kinds and not isinstance(value, float):
        found.append(True if word in _TRUE else False if word in _FALSE else None)
    if isinstance(value, str):
        number = _number_in(value)
        found += [number, int(number) if number is not None and number.is_integer() else None]
    elif isinstance(value, float) and value.is_integer():
        found.append(int(value))
    return found


def _remedy(key: Key, value: Any) -> str:
    """The change most likely to make the value right."""
    numeric = key.kinds & {"integer", "number"}
    if value is None:
        return f"give a value, or remove it for the default ({as_written(key.default)})"
    meant = value_meant(key, value)
    if isinstance(value, str):
        close = nearest(value.lower(), key.choices)
        if meant is None and "null" in key.kinds and value.strip().lower() in _NOTHING:
            return "write null"
        if close and meant is None:
            return f"did you mean {close}?"
        if key.item_choices and value:
            return _words_meant(key, [word.strip() for word in value.split(",")])
        if "array" in key.kinds and value:
            return f"write [{value}]"
        if numeric:
            return _digits(value, meant)
        if meant is not None and not key.form and "boolean" not in key.kinds:
            return f"write {as_written(meant)}" + beside_word(value.lower())
        if "boolean" in key.kinds:
            return "write true or false, without quotes" + (f": here {as_written(meant)}" if meant is not None else "")
        if key.form:
            return f"write {key.form}" + (f": here {meant}" if meant is not None else "")
        if "string" in key.kinds:
            return "use characters that UTF-8 has" if value else "give a text that is not empty"
        return f"give {key.takes}"
    return _remedy_of_another_kind(key, value, meant)


def _remedy_of_another_kind(key: Key, value: Any, meant: Any) -> str:
    if meant is not None:
        return f"write {as_written(meant)}" + (" (or a time: 10m)" if str(meant).endswith("steps") else "")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and key.is_text and (not key.form or accepts(key.dotted, str(value))):
        return "put it in quotes" + (f': "{as_written(value)}"' if isinstance(value, int) else "")
    if is_number and 1 < value <= 100 and key.name.endswith(("fraction", "share")):
        return f"write {value / 100:g} for {value:g} %"
    if isinstance(value, Mapping) and "object" in key.kinds:
        return f"use text for the keys inside {key.dotted}"
    return f"give {key.takes}"


def _digits(value: str, meant: Any) -> str:
    if meant is None:
        return "write digits, without unit or comma"
    try:
        float(value)
    except ValueError:
        doubled = _binary_thousands(value)
        return f"write digits: {as_written(meant)}" + (f", or {doubled}" if doubled else "")
    return f"remove the quotes: {value.strip()}"


def _number_in(text: str) -> float | None:
    """1,000 and 16k and 5 % and 2e−5 as numbers."""
    plain = text.strip().lower().replace("−", "-").replace(",", "").replace(" ", "")
    match = re.fullmatch(r"([-+]?[\d.]+(?:e[-+]?\d+)?)(k|m|b|g|%)?", plain)
    try:
        number = float(match[1]) if match else None
    except ValueError:
        return None
    if number is None or match is None or match[2] is None:
        return number
    return number / 100 if match[2] == "%" else number * _THOUSANDS[match[2]]


def _binary_thousands(text: str) -> int | None:
    """16k is 16384 to some."""
    match = re.fullmatch(r"(\d+)k", text.strip().lower())
    return int(match[1]) * 1024 if match else None
