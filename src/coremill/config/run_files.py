"""The text of a run file, or what was named instead of one: a typing slip, a model, data, a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from coremill.errors import ConfigError, InputError
from coremill.nearby import nearest

_NEARBY_SHOWN = 8
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_DATA = ("data", "name it as the data: --set data.source={}")
_NOT_RUN_FILES = {
    ".py": ("a Python script", "start it with: coremill launch {}"),
    ".sh": ("a shell script", "name a .yaml file; a script is started with: bash {}"),
    ".ipynb": ("a notebook", "name a .yaml file; to start a script: coremill launch SCRIPT"),
    ".safetensors": ("a file of weights", "name its folder as the model: --set model=FOLDER"),
    **dict.fromkeys((".jsonl", ".txt", ".csv", ".tsv", ".parquet"), _DATA),
}


def read_run_file(path: Path) -> str:
    """The text of the file; a missing or unreadable one is a ConfigError that says what is there instead."""
    if path.suffix in _NOT_RUN_FILES and path.is_file():
        kind, do = _NOT_RUN_FILES[path.suffix]
        why = "a run is described by one YAML file, or by --set"
        raise ConfigError(
            [InputError(f"{path} is {kind}, not a run file", where=str(path), why=why, do=do.format(path))]
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        what = f"there is no file {path}"
        why, do = _why_missing(path)
    except IsADirectoryError:
        what, why = f"{path} is a folder, not a run file", "a run is described by one file"
        found = _yaml_files(path)
        do = f"name a file in it: {_listed(found)}" if found else "name a .yaml file; there is none in this folder"
        if (path / "config.json").is_file():
            what, do = f"{path} is a model's folder, not a run file", f"name it as the model: --set model={path}"
    except UnicodeDecodeError as error:
        what, why = f"{path} is not a text file", f"byte {error.start} is not UTF-8 text"
        do = "save the file as UTF-8, or name another one"
    except OSError as error:
        what, why = f"{path} cannot be read", (error.strerror or str(error)).lower()
        do = "check the name, and the permissions of the file and its folders"
    raise ConfigError([InputError(what, where=str(path), why=why, do=do)])


def _why_missing(path: Path) -> tuple[str, str]:
    """Why there may be no such file, and what to name instead."""
    folder = path.parent
    if "=" in path.name:
        return "it looks like key=value, not like a file", f"a single value is changed with --set {path}"
    found = _yaml_files(folder if folder.is_dir() else Path("."))
    if not folder.is_dir():
        why = f"there is no folder {folder}"
    else:
        why = f"the folder {folder.resolve()} has " + ("no such file" if found else "no .yaml file at all")
    close = nearest(path.name, (file.name for file in found))
    if close:
        return why, f"did you mean {next(file for file in found if file.name == close)}?"
    if found:
        return why, f"name one of {_listed(found)}"
    if _HUB_ID.fullmatch(str(path)):
        return why, f"name a run file; a model of the hub is named with --set model={path}"
    return why, "name a run file; without one, `coremill train` runs the built-in example"


def _yaml_files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    except OSError:
        return []


def _listed(files: Sequence[Path]) -> str:
    shown = ", ".join(str(file) for file in files[:_NEARBY_SHOWN])
    return shown if len(files) <= _NEARBY_SHOWN else f"{shown} and {len(files) - _NEARBY_SHOWN} more"
