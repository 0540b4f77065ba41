"""A file of settings that another tool wrote, YAML or JSON -> plain values that remember their line.

Nothing in it is run: a pickle is refused by its first bytes, and no more than half a MB is ever read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.config.document import KeyPath, read_document
from coremill.errors import InputError
from coremill.nearby import nearest

LARGEST_BYTES = 512 << 10  # no tool writes settings near this, and YAML of this size takes seconds to read
_KINDS = "a file of accelerate or Axolotl, a DeepSpeed JSON, or TrainingArguments as JSON or YAML"
_VERSION_KEYS = ("version", "config_version", "schema_version", "format_version", "file_version")
_UNPICKLE = "python -c \"import torch; print(torch.load('{}', weights_only=False).to_json_string())\" > args.json"
# First bytes of files that are no text: torch saves a zip archive around a pickle, and once saved the pickle alone.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class SettingsFile:
    """The values of a file; `lines` has the line of every key by its path (of JSON that is not YAML too: none)."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[KeyPath, int]

    @property
    def name(self) -> str:
        return self.path.name


def read_text_file(path: Path) -> str:
    """The text of a small file; InputError for anything else."""
    where = str(path)
    try:
        if path.is_dir():
            raise InputError(
                f"{path} is a folder", where=where, why=f"what is read is {_KINDS}", do="name a file in it"
            )
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError(f"{path} cannot be read", where=where, why=why, do="check its name and permissions") from None
    if content.startswith(_PICKLES):
        raise InputError(
            f"{path} is a pickle, which is not opened",
            where=where,
            why="reading a pickle runs the code in it",
            do=f"if you trust it, write its settings out first, and import these: {_UNPICKLE.format(path.name)}",
        )
    if len(content) > LARGEST_BYTES:
        why = f"it has more than {LARGEST_BYTES >> 10} KB, which settings never have"
        raise InputError(f"{path} is no file of settings", where=where, why=why, do=f"name {_KINDS}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8 text"
        raise InputError(f"{path} is not a text file", where=where, why=why, do=f"name {_KINDS}") from None
    if "\0" in text:
        raise InputError(f"{path} is not a text file", where=where, why="it has zero bytes", do=f"name {_KINDS}")
    if not text.strip():
        raise InputError(f"{path} is empty", where=where, why="there is nothing to import", do=f"name {_KINDS}")
    return text


def read_settings_file(path: Path) -> SettingsFile:
    """Read YAML or JSON; InputError where it is neither, holds no settings, or says a version nobody here knows."""
    return settings_of_text(read_text_file(path), path)


def settings_of_text(text: str, path: Path) -> SettingsFile:
    """The settings in the text of a file."""
    if text.lstrip().startswith("{"):
        values, lines = _json(text, path)
    else:
        document = read_document(text)
        if document.flaws:
            flaw = document.flaws[0]
            place = f"{path}:{flaw.line}" + (f":{flaw.column}" if flaw.column is not None else "")
            raise InputError(flaw.what, where=place, why=flaw.why, do=flaw.do or "correct it there")
        values, lines = document.value, document.lines
    if not isinstance(values, dict):
        kind = {list: "a list", type(None): "nothing but comments"}.get(type(values), "plain text")
        why = f"settings have names and values; what is read is {_KINDS}"
        raise InputError(f"{path} holds {kind}", where=f"{path}:1", why=why, do="name another file")
    if not values:
        raise InputError(f"{path} holds no settings", where=f"{path}:1", why="there is nothing to import",
                         do=f"name {_KINDS}")  # fmt: skip
    for key in _VERSION_KEYS:
        if key in values:
            why = (
                "neither accelerate, DeepSpeed nor transformers gives its settings a version, so their meaning is open"
            )
            do = f"remove {key} if the file is one of theirs all the same, or name {_KINDS}"
            line = lines.get((key,), 1)
            raise InputError(f"{path} says {key}: {values[key]}", where=f"{path}:{line}", why=why, do=do)
    return SettingsFile(path, {str(name): value for name, value in values.items()}, lines)


def _json(text: str, path: Path) -> tuple[Any, Mapping[KeyPath, int]]:
    """By the JSON reader, which takes tabs and long lines; lines come from YAML's where it reads the text too."""
    twice: list[str] = []

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            twice.extend([name] if name in found else [])
            found[name] = value
        return found

    try:
        values = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        do = "correct it there: names and texts stand in double quotes, a comma between settings"
        raise InputError("this is not valid JSON", where=place, why=error.msg.lower(), do=do) from None
    except (RecursionError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{path} cannot be read", where=str(path), why=why, do=f"name {_KINDS}") from None
    if twice:
        why = "only one of them could count"
        raise InputError(f"{twice[0]} is given twice", where=str(path), why=why, do="keep one")
    return values, read_document(text).lines


def _missing(path: Path) -> InputError:
    folder = path.parent
    try:
        names = [each.name for each in folder.iterdir() if each.suffix in (".yaml", ".yml", ".json", ".sh")]
    except OSError:
        names = []
    close = nearest(path.name, names)
    do = f"did you mean {folder / close}?" if close else "name a file, or a command after --: -- torchrun train.py"
    return InputError(f"there is no file {path}", where=str(path), do=do)
