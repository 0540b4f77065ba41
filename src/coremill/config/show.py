"""`coremill config show` and `coremill config schema`: the config as a person reads it, and as an editor checks it.

What is shown is a run file again: every key written out, each with a comment on where its value came from.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from coremill.config.document import KeyPath, dotted_key, read_document
from coremill.config.keys import raw_schema, sections
from coremill.config.layers import DEFAULT
from coremill.config.load import LoadedConfig

_COMMENT_COLUMN = 44  # where the comments stand, unless a line is longer
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@*+-]*(:[A-Za-z0-9_./@*+-]+)*")  # no YAML sign first, no ': ', no ' #'
_NOT_PRINTABLE = re.compile(r"[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def show(loaded: LoadedConfig) -> str:
    """The whole config, every key written out; `load_config` of this text gives an equal config."""
    lines = [] if loaded.without_file is None else [f"# {loaded.without_file}"]
    for path, text in _rows(loaded.config.model_dump(), ()):
        origin = "" if path is None else f"  # {loaded.origins.get(dotted_key(path), DEFAULT)}"
        lines.append(f"{text:<{_COMMENT_COLUMN}}{origin}" if origin else text)
    return "".join(f"{line}\n" for line in lines)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a run file, for editors and other checkers."""
    schema = copy.deepcopy(raw_schema())
    for name, rules in schema["properties"].items():
        if name in sections():  # a section whose keys are all commented out is null, and as good as left out
            alternatives = rules.pop("anyOf", None) or [{"$ref": rules.pop("$ref")}]
            rules["anyOf"] = [*alternatives, {"type": "null"}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "coremill run file",
        "description": "What to train, on which text, for how long and on which machines.",
        "type": ["object", "null"],
    }


def scalar_text(value: Any) -> str:
    """A value on one line of YAML, such that reading it gives the same value back."""
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, str):
        return _string_text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar_text(key)}: {scalar_text(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(scalar_text(item) for item in value) + "]"


def _rows(tree: Mapping[Any, Any], above: KeyPath) -> Iterator[tuple[KeyPath | None, str]]:
    """Lines of text, each with the path of its value; None for the head of a section."""
    for name, value in tree.items():
        path = (*above, name)
        head = "  " * len(above) + f"{scalar_text(name)}:"
        if isinstance(value, Mapping) and value:
            yield None, head
            yield from _rows(value, path)
        else:
            yield path, f"{head} {scalar_text(value)}"


def _float_text(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text  # 2.0e-05: a number to YAML 1.1 too


def _string_text(value: str) -> str:
    if _PLAIN.fullmatch(value) and read_document(value).value == value:
        return value
    # JSON's quoting is YAML's, except that YAML has no surrogate pairs, so characters stay whole unless unprintable
    return _NOT_PRINTABLE.sub(_escape, json.dumps(value, ensure_ascii=False))


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
