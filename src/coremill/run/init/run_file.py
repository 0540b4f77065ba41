"""The text of a new run file: the keys that were answered, each with what the schema says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coremill.config.keys import keys
from coremill.config.load import LoadedConfig
from coremill.config.schema import BUILT_IN
from coremill.config.show import scalar_text

_COMMENT_COLUMN = 36
_LONGEST_COMMENT = 76


def run_file_text(loaded: LoadedConfig, path: Path) -> str:
    """Loading it gives the config it was made from; keys at their defaults are left out."""
    values = loaded.config.model_dump()
    lines = [f"# coremill train {path}", "#", "# Made by coremill config init. Every key: docs/config.md. What is not"]
    lines.append("# here has its default; ranks, threads, dtype and engine are chosen by the plan: coremill plan FILE")
    given = [key for key in keys().values() if loaded.origins[key.dotted].kind != "default"]
    head = ""
    for key in given:
        value: Any = values[key.section][key.name] if key.section else values[key.name]
        of_example = loaded.origins[key.dotted].file == BUILT_IN
        comment = "as in the built-in example" if of_example else _first(key.description)
        if key.section == "model" and [each.name for each in given if each.section == "model"] == ["name"]:
            lines.append(_line("model", value, comment))
            continue
        if key.section and key.section != head:
            lines.append(f"{key.section}:")
        head = key.section
        lines.append(_line(f"{'  ' if key.section else ''}{key.name}", value, comment))
    return "".join(f"{line}\n" for line in lines)


def _line(name: str, value: Any, comment: str) -> str:
    text = f"{name}: {scalar_text(value)}"
    return f"{text:<{_COMMENT_COLUMN}}  # {comment}"


def _first(description: str) -> str:
    """As much of it as a line holds."""
    text = description.partition(";")[0]
    return text if len(text) <= _LONGEST_COMMENT else text[: text.rindex(" ", 0, _LONGEST_COMMENT)] + " ..."
