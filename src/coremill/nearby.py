"""What was probably meant: the nearest word of a list, the nearest path on this machine's disk."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from coremill.errors import InputError
from coremill.files import at_home

PATH_ADVICE = "correct the path; relative ones are looked for in the current folder, then beside the run file"
_CLOSE_ENOUGH = 0.7  # difflib's ratio: lets through `stepz`, `learning_rte`, `sequence_len`; not `foo` for `rows`
_PATHS_TRIED = 3  # of the names near one part of a path
_NAMES_READ = 2000  # of a folder: comparing is slow, and nobody mistypes one of a million
_NAMES_SHOWN = 8
_ENDINGS = (".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet")  # of text, tried in a pattern that matches nothing


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, where one is close enough to be a slip of the fingers."""
    found = difflib.get_close_matches(word, list(candidates), n=1, cutoff=_CLOSE_ENOUGH)
    return found[0] if found else None


def nearest_path(path: str, wanted: Callable[[Path], bool] = Path.exists) -> str | None:
    """The path with every part that is not there replaced by a name near it; None: nothing wanted is near.

    From the first part with a `*` or `?` on it is a pattern, and has to match something.
    """
    whole = at_home(path)
    found = _search(Path(whole.anchor), whole.relative_to(whole.anchor).parts, wanted)
    return None if found is None or found == whole else str(found)


def what_is_in(path: str) -> str:
    """What the nearest folder above a path that is not there holds, in words."""
    folder = at_home(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    names = [name for name in _names(folder) if not name.startswith(".")]
    if not names:
        return f"{folder} is empty"
    more = len(names) - _NAMES_SHOWN
    return f"{folder} holds: {', '.join(names[:_NAMES_SHOWN])}" + (f" and {more} more" if more > 0 else "")


def missing_folder(folder: Path, setting: str, what: str) -> InputError:
    """What to name instead of a folder that is not there."""
    if folder.is_file():
        why = f"it is a file: a {setting} is the whole folder around it"
        return InputError(what, where=setting, why=why, do=f"set {setting}: {folder.parent}")
    near = nearest_path(str(folder), Path.is_dir)
    do = f"did you mean {near}?" if near else PATH_ADVICE
    return InputError(what, where=setting, why=what_is_in(str(folder)), do=do)


def is_pattern(path: str) -> bool:
    return glob.has_magic(path)


def _search(folder: Path, parts: tuple[str, ...], wanted: Callable[[Path], bool]) -> Path | None:
    if not parts:
        return folder if wanted(folder) else None
    head, rest = parts[0], parts[1:]
    if is_pattern(head):
        pattern = folder.joinpath(*parts)
        others = (pattern.with_suffix(ending) for ending in _ENDINGS if pattern.suffix)
        return next((each for each in (pattern, *others) if _matches(each)), None)
    if head == ".." or (folder / head).exists():
        found = _search(folder / head, rest, wanted)
        if found is not None:
            return found
    names = {name.rstrip("/").lower(): name.rstrip("/") for name in _names(folder)}
    for near in difflib.get_close_matches(head.lower(), names, n=_PATHS_TRIED, cutoff=_CLOSE_ENOUGH):
        if names[near] != head and (found := _search(folder / names[near], rest, wanted)) is not None:
            return found
    return None


def _matches(pattern: Path) -> bool:
    return next(glob.iglob(str(pattern), recursive=True), None) is not None


def _names(folder: Path) -> list[str]:
    """What a folder holds, folders with a slash."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.name + ("/" if entry.is_dir() else "") for entry in islice(entries, _NAMES_READ)]
    except OSError:
        return []
    return sorted(found)
