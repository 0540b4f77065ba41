"""Relative paths of a run file: looked for in the current folder, then beside the run file, and which was taken.

The config keeps what the user wrote, which is what a continuation compares; only those who open things go by the
places found here. A name that lies in neither folder stays as it is: it may be a hub id, or for another machine.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coremill.config.schema import BUILT_IN, RunConfig
from coremill.files import at_home
from coremill.nearby import is_pattern, nearest_path

PATH_KEYS = (
    *("model.name", "tokenizer", "data.source", "data.evaluation_source", "data.chat_template"),
    "lora.start_from",
)
CHECKPOINTS = "checkpoint.folder"  # written to, so in the current folder only
_FOLDER_KEYS = ("model.name", "tokenizer", "lora.start_from")  # of the others files and patterns


@dataclass(frozen=True)
class Places:
    """Where paths of a config lie, for those that are not taken as they are written, and what to tell about it."""

    paths: Mapping[str, str] = field(default_factory=dict)  # by key
    notes: tuple[str, ...] = ()
    checkpoints: Mapping[str, str] | None = None  # of a run that goes on: its record of checkpoint.folder


def find_places(config: RunConfig, run_file: Path | None) -> Places:
    """Look for every relative path of a config; nothing is said of one that is where it always was."""
    if run_file is None or _is_same_folder(run_file.parent, Path()):
        return Places()
    paths: dict[str, str] = {}
    notes: list[str] = []
    for key, written in relative_paths(config).items():
        beside = str(run_file.parent / written)
        if not is_there(key, beside):
            continue
        name = key.removesuffix(".name")
        if not is_there(key, written):
            paths[key] = beside
            notes.append(f"note: {name}: {written} is not in the current folder: taken beside the run file, {beside}")
        elif is_pattern(written) or not os.path.samefile(written, beside):
            notes.append(
                f"note: {name}: {written} is in the current folder and beside the run file: the current folder's is"
                f" taken, not {beside}"
            )
    return Places(paths, tuple(notes))


def places_to_record(config: RunConfig, places: Places) -> dict[str, dict[str, str]]:
    """For the folder of a run: what each relative path was taken for, so that its continuation takes the same."""
    taken = {key: places.paths.get(key, written) for key, written in relative_paths(config).items()}
    found = {key: written for key, written in relative_paths(config).items() if is_there(key, taken[key])}
    if (folder := config.checkpoint.folder) is not None and _may_be_relative(folder):
        found[CHECKPOINTS] = taken[CHECKPOINTS] = folder
    record = {key: {"written": written, "taken": str(Path(taken[key]).absolute())} for key, written in found.items()}
    return record if places.checkpoints is None else {**record, CHECKPOINTS: dict(places.checkpoints)}


def checkpoints_recorded(config: RunConfig, record: Mapping[str, Mapping[str, str]]) -> str | None:
    """Where the run that goes on has its checkpoints, if the current folder says another place; None: as written."""
    written, taken = config.checkpoint.folder, record.get(CHECKPOINTS, {}).get("taken")
    if written is None or taken is None or record[CHECKPOINTS].get("written") != written:
        return None
    return None if os.path.realpath(written) == os.path.realpath(taken) else taken


def places_recorded(config: RunConfig, places: Places, record: Mapping[str, Mapping[str, str]]) -> Places:
    """Where the run that goes on has its paths from: the current folder may be another one now."""
    paths, notes = dict(places.paths), list(places.notes)
    for key, written in relative_paths(config).items():
        taken = record.get(key, {}).get("taken", "")
        now = places.paths.get(key, written)
        if record.get(key, {}).get("written") != written or not is_there(key, taken):
            continue
        if os.path.realpath(now) != os.path.realpath(taken):
            paths[key] = taken
            name = key.removesuffix(".name")
            notes = [note for note in notes if not note.startswith(f"note: {name}: ")]
            notes.append(f"note: {name}: {written} is taken where this run has it from, {taken}")
    return Places(paths, tuple(notes))


def relative_paths(config: RunConfig) -> dict[str, str]:
    """The settings that may be relative paths, by key."""
    found = {key: value_at(config, key) for key in PATH_KEYS}
    found |= {_listed(place): one.source for place, one in enumerate(config.data.sources or ())}
    return {key: value for key, value in found.items() if value is not None and _may_be_relative(value)}


def _listed(place: int) -> str:
    """The key of one of several sources."""
    return f"data.sources[{place}].source"


def value_at(config: RunConfig, key: str) -> str | None:
    """The text under one of `PATH_KEYS`."""
    section, _, name = key.partition(".")
    value = getattr(config, section)
    found: str | None = getattr(value, name) if name else value
    return found


def with_paths(config: RunConfig, paths: Mapping[str, str]) -> RunConfig:
    """The config with other paths under some of `PATH_KEYS`, or in the list of sources."""
    for key, path in paths.items():
        section, _, name = key.partition(".")
        if key not in PATH_KEYS:
            entries = [
                one.model_copy(update={"source": path}) if key == _listed(place) else one
                for place, one in enumerate(config.data.sources or ())
            ]
            config = config.model_copy(update={"data": config.data.model_copy(update={"sources": entries})})
            continue
        value = getattr(config, section).model_copy(update={name: path}) if name else path
        config = config.model_copy(update={section: value})
    return config


def is_there(key: str, path: str) -> bool:
    """Whether what a key wants lies at a path: a folder, or files."""
    expanded = at_home(path)
    if key in _FOLDER_KEYS:  # a file in it is refused later, by its name
        return expanded.is_dir() or (expanded.suffix != "" and expanded.is_file())
    return expanded.exists() or next(glob.iglob(str(expanded), recursive=True), None) is not None


def meant_beside(config: RunConfig, key: str, run_file: Path | None) -> str | None:
    """For a path that is in neither folder: one near it beside the run file."""
    written = relative_paths(config).get(key)
    if run_file is None or written is None or is_there(key, written) or _is_same_folder(run_file.parent, Path()):
        return None
    near = nearest_path(str(run_file.parent / written))
    return near if near is not None and is_there(key, near) else None


def _may_be_relative(value: str) -> bool:
    return value != BUILT_IN and "://" not in value and not value.startswith(("/", "~"))


def _is_same_folder(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return True  # a folder that is gone: nothing lies beside the file
