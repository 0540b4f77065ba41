"""Which files a source means, and of which kind they are: told by their names, before any is opened.

A path, a glob, or a folder: of a folder everything below it that is data. One source has one kind; what lies beside
data in a folder (a README, scripts) is passed over.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from coremill.data.compressed import COMPRESSIONS, UNREAD_COMPRESSIONS
from coremill.data.hub_datasets import PREFIX
from coremill.errors import InputError
from coremill.files import at_home
from coremill.nearby import PATH_ADVICE, nearest_path, what_is_in

FileKind = Literal["txt", "jsonl", "json", "csv", "tsv", "parquet"]
KIND_OF_SUFFIX: dict[str, FileKind] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
READ_KINDS = ".txt, .jsonl, .json, .csv, .tsv and .parquet, each also as .gz or .zst"
NEARBY_NAMES = 8
_HUB_NAME = re.compile(r"[\w-]+(/[\w-]+)?")  # a file would have an ending


def kind_of_name(name: str) -> FileKind | None:
    """The kind of a file by its name, compressed or not; None: none that is read."""
    path = Path(name.lower())
    if path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
    return KIND_OF_SUFFIX.get(path.suffix)


def find_files(pattern: str, setting: str) -> tuple[FileKind, tuple[str, ...]]:
    """The files that a path, a glob or a folder means, in order of their names, and the kind of all of them."""
    expanded = str(at_home(pattern))
    literal = Path(expanded)
    if literal.is_dir():
        return _of_folder(literal, pattern, setting)
    if literal.is_file():
        found = [str(literal.absolute())]
    else:
        matches = map(Path, glob.glob(expanded, recursive=True))
        found = sorted(str(path.absolute()) for path in matches if path.is_file())
    if not found:
        raise InputError(
            "no file matches" if glob.has_magic(expanded) else "there is no such file",
            where=f"{setting}: {pattern}",
            why=what_is_in(expanded),
            do=_what_was_meant(pattern),
        )
    for file in found:
        if kind_of_name(file) is None:
            raise _not_read(file, pattern, setting)
    return _one_kind(found, f"{setting}: {pattern}", "it matches", _common_folder(found)), tuple(found)


def _of_folder(folder: Path, pattern: str, setting: str) -> tuple[FileKind, tuple[str, ...]]:
    found: list[str] = []
    others: list[str] = []
    for parent, names, files in os.walk(folder.absolute()):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                (found if kind_of_name(name) else others).append(str(Path(parent, name)))
    if not found:
        listing = ", ".join(sorted({Path(name).suffix or Path(name).name for name in others})[:NEARBY_NAMES])
        packed = next((name for name in others if Path(name).suffix.lower() in UNREAD_COMPRESSIONS), None)
        if packed is not None:
            raise _not_read(packed, pattern, setting)
        raise InputError(
            "the folder holds no data",
            where=f"{setting}: {pattern}",
            why=f"below it are only {listing}; what is read is {READ_KINDS}" if others else "it is empty",
            do="name a folder or files with data",
        )
    found.sort()
    return _one_kind(found, f"{setting}: {pattern}", "below it are", pattern.rstrip("/")), tuple(found)


def _one_kind(files: Sequence[str], where: str, verb: str, folder: str) -> FileKind:
    by_kind: dict[FileKind, list[str]] = {}
    for file in files:
        kind = kind_of_name(file)
        assert kind is not None
        by_kind.setdefault(kind, []).append(file)
    if len(by_kind) > 1:
        most = max(by_kind.values(), key=len)[0]
        listing = ", ".join(f"{len(names)} .{kind}" for kind, names in sorted(by_kind.items()))
        raise InputError(
            "the files are of different kinds",
            where=where,
            why=f"{verb} {listing}; one source has one kind",
            do=f"write a glob for one kind, such as {folder}/**/*{whole_suffix(most)}, or a source for each in"
            " data.sources",
        )
    return next(iter(by_kind))


def whole_suffix(file: str) -> str:
    """.jsonl.gz"""
    path = Path(file)
    return Path(path.stem).suffix + path.suffix if path.suffix.lower() in COMPRESSIONS else path.suffix


def _common_folder(files: Sequence[str]) -> str:
    return os.path.commonpath([str(Path(file).parent) for file in files])


def _not_read(file: str, pattern: str, setting: str) -> InputError:
    path = Path(file)
    inner = Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    undo = UNREAD_COMPRESSIONS.get(inner) or UNREAD_COMPRESSIONS.get(path.suffix.lower())
    if undo is not None:
        return InputError(
            f"{path.name} is packed in a way that is not read",
            where=f"{setting}: {pattern}",
            why="of compressed files coremill reads .gz and .zst, each with one file inside",
            do=f"unpack it first: {undo} {path.name}",
        )
    do = "convert it, or write a glob that leaves it out"
    if path.suffix.lower() == ".arrow":
        do = "write it as parquet: datasets.load_from_disk(FOLDER).to_parquet('data.parquet')"
    elif path.suffix.lower() in ("", ".md", ".text", ".log"):
        do = "where it is plain text, name it .txt; else convert it, or write a glob that leaves it out"
    return InputError(
        f"{path.name} is not a kind of file coremill reads",
        where=f"{setting}: {pattern}",
        why=f"it reads {READ_KINDS}",
        do=do,
    )


def _what_was_meant(pattern: str) -> str:
    """The nearest path that is there; for what has no ending, perhaps a dataset of the hub."""
    near = nearest_path(pattern)
    if near is not None:
        return f"did you mean {near}?"
    if _HUB_NAME.fullmatch(pattern):
        return f"{PATH_ADVICE}; a dataset of the hub is written {PREFIX}{pattern}"
    return f"{PATH_ADVICE}; quote globs"
