"""From `data.source` to a stream of documents: which text is meant, what identifies it, and how to read it.

Three steps, so that the first two cost little and can run in the launcher:

    resolve_source   which files, or which commit of a dataset; finds what does not exist
    identity_of      a hash of the content: it changes when the text changes, wherever the files lie
    open_text        the documents themselves, piece by piece (in the tokenising process)
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from coremill.config.schema import BUILT_IN
from coremill.data.bad_rows import BadRows, OnBadRows
from coremill.data.files import read_jsonl, read_parquet, read_txt
from coremill.data.hub_datasets import PREFIX, Dataset, open_dataset, resolve_dataset
from coremill.data.pieces import Piece
from coremill.errors import InputError
from coremill.nearby import PATH_ADVICE, nearest_path, what_is_in

FileKind = Literal["txt", "jsonl", "parquet"]
KIND_OF_SUFFIX: dict[str, FileKind] = {".txt": "txt", ".jsonl": "jsonl", ".parquet": "parquet"}
HASH_BLOCK_BYTES = 1 << 22
_DATASET_ADDRESS = re.compile(r"https?://(?:huggingface\.co|hf\.co)/datasets/([\w.-]+(?:/[\w.-]+)?)")
_HUB_NAME = re.compile(r"[\w-]+(/[\w-]+)?")  # a file would have an ending
# Not in the built-in corpus: installed packages, tests (17 MB of one kind) and IDLE.
LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """A source that was found; plain values, so that it can be handed to the tokenising process."""

    name: str  # as the user wrote it
    setting: str  # the key it was written under
    kind: Literal["txt", "jsonl", "parquet", "hub", "built-in"]
    column: str
    files: tuple[str, ...] = ()
    dataset: Dataset | None = None
    on_bad_rows: OnBadRows = "stop"

    @property
    def where(self) -> str:
        return f"{self.setting}: {self.name}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TextSource:
        dataset = document["dataset"]
        found = None if dataset is None else Dataset(**dataset)
        return cls(**{**document, "files": tuple(document["files"]), "dataset": found})


@dataclass(frozen=True)
class OpenedText:
    """Documents as a stream, and how much there is where that is known."""

    pieces: Iterator[Piece]
    bytes_total: int | None
    bad: BadRows = field(default_factory=BadRows)  # filled while the pieces are read


def resolve_source(
    name: str, *, column: str, split: str, setting: str = "data.source", on_bad_rows: OnBadRows = "stop"
) -> TextSource:
    """Find the files or the dataset that `name` means; nothing is read or downloaded yet."""
    how: dict[str, Any] = {"name": name, "setting": setting, "column": column, "on_bad_rows": on_bad_rows}
    if name == BUILT_IN:
        files = tuple(str(path) for path in built_in_files())
        return TextSource(kind="built-in", files=files, **how)
    if name.startswith(PREFIX):
        dataset = resolve_dataset(name, split=split, setting=setting)
        return TextSource(kind="hub", dataset=dataset, **how)
    if "://" in name:
        address = _DATASET_ADDRESS.match(name)
        raise InputError(
            f"'{name.split('://')[0]}://' is not a source coremill can read",
            where=f"{setting}: {name}",
            do=f"write {PREFIX}{address[1]}"
            if address
            else "use hf://[owner/]name[:config][@revision], a glob of local files, or built-in",
        )
    files = _matching_files(name, setting)
    return TextSource(kind=_kind_of_files(files, name, setting), files=files, **how)


def identity_of(source: TextSource, on_bytes: Callable[[int], None] | None = None) -> str:
    """What the text is, wherever it lies: a hash over kind, column and the content of all files, or over a commit."""
    digest = hashlib.blake2b(digest_size=20)
    if source.dataset is not None:
        digest.update(repr(("hub", source.column, *source.dataset.identity)).encode())
        return digest.hexdigest()
    # Plain text has no columns, so a changed data.column must not tokenise it again.
    digest.update(repr((source.kind, source.column if source.kind in ("jsonl", "parquet") else "")).encode())
    for file in source.files:
        digest.update(_content_hash(Path(file), on_bytes))
    return digest.hexdigest()


def stamps_of(source: TextSource) -> tuple[tuple[int, int], ...]:
    """Size and time of every file: equal before and after reading, or the text changed under our hands."""
    stamps = []
    for file in source.files:
        status = Path(file).stat()
        stamps.append((status.st_size, status.st_mtime_ns))
    return tuple(stamps)


def open_text(source: TextSource) -> OpenedText:
    """The documents of a source, in order of file and row."""
    bad = BadRows(source.on_bad_rows)
    if source.dataset is not None:
        pieces, bytes_total = open_dataset(source.dataset, column=source.column, where=source.where, bad=bad)
        return OpenedText(pieces, bytes_total, bad)
    return OpenedText(_read_files(source, bad), sum(Path(file).stat().st_size for file in source.files), bad)


def _read_files(source: TextSource, bad: BadRows) -> Iterator[Piece]:
    for file in source.files:
        path = Path(file)
        if source.kind == "jsonl":
            yield from read_jsonl(path, source.column, bad)
        elif source.kind == "parquet":
            yield from read_parquet(path, source.column, bad)
        elif source.kind == "txt":
            yield from read_txt(path, bad)
        else:
            try:
                yield from list(read_txt(path, BadRows()))
            except InputError:  # not UTF-8: left out of the built-in corpus
                continue


def _content_hash(path: Path, on_bytes: Callable[[int], None] | None) -> bytes:
    digest = hashlib.blake2b(digest_size=20)
    try:
        with path.open("rb") as stream:
            while block := stream.read(HASH_BLOCK_BYTES):
                digest.update(block)
                if on_bytes is not None:
                    on_bytes(len(block))
    except OSError as error:
        raise InputError(
            "the file cannot be read", where=str(path), why=error.strerror, do="check its permissions"
        ) from None
    return digest.digest()


def _matching_files(pattern: str, setting: str) -> tuple[str, ...]:
    expanded = str(Path(pattern).expanduser())
    literal = Path(expanded)
    if literal.is_dir():
        kinds = sorted({path.suffix for path in literal.rglob("*") if path.suffix in KIND_OF_SUFFIX})
        raise InputError(
            f"{pattern} is a folder, not files",
            where=f"{setting}: {pattern}",
            why=f"it holds {', '.join(kinds)} files" if kinds else "it holds no .txt, .jsonl or .parquet file",
            do=f"write {pattern.rstrip('/')}/**/*{kinds[0] if kinds else '.txt'}",
        )
    if literal.is_file():
        return (str(literal.absolute()),)
    found = sorted(str(path.absolute()) for path in map(Path, glob.glob(expanded, recursive=True)) if path.is_file())
    if not found:
        raise InputError(
            "no file matches" if glob.has_magic(expanded) else "there is no such file",
            where=f"{setting}: {pattern}",
            why=what_is_in(expanded),
            do=_what_was_meant(pattern),
        )
    return tuple(found)


def _what_was_meant(pattern: str) -> str:
    """The nearest path that is there; for what has no ending, perhaps a dataset of the hub."""
    near = nearest_path(pattern)
    if near is not None:
        return f"did you mean {near}?"
    if _HUB_NAME.fullmatch(pattern):
        return f"{PATH_ADVICE}; a dataset of the hub is written {PREFIX}{pattern}"
    return f"{PATH_ADVICE}; quote globs"


def _kind_of_files(files: tuple[str, ...], pattern: str, setting: str) -> FileKind:
    suffixes: dict[str, list[str]] = {}
    for file in files:
        suffixes.setdefault(Path(file).suffix.lower(), []).append(Path(file).name)
    if unknown := [suffix for suffix in suffixes if suffix not in KIND_OF_SUFFIX]:
        raise InputError(
            f"{suffixes[unknown[0]][0]} is not a kind of file coremill reads",
            where=f"{setting}: {pattern}",
            why="it reads .txt, .jsonl and .parquet",
            do="convert it, or write a glob that leaves it out",
        )
    if len(suffixes) > 1:
        listing = ", ".join(f"{len(names)} {suffix}" for suffix, names in sorted(suffixes.items()))
        raise InputError(
            "the files are of different kinds",
            where=f"{setting}: {pattern}",
            why=f"it matches {listing}; one source has one kind",
            do=f"write a glob for one kind, such as *{next(iter(sorted(suffixes)))}",
        )
    return KIND_OF_SUFFIX[next(iter(suffixes))]


def built_in_files() -> tuple[Path, ...]:
    """The built-in corpus: the source text of the Python standard library, about 11 MB that every user already has.

    One document per .py file, in the order of their paths; one that is not UTF-8 is left out. A walk that never enters
    installed packages takes 10 ms, a recursive glob 400.
    """
    root = sysconfig.get_path("stdlib")
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in LEFT_OUT_FOLDERS)
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    if not found:
        raise InputError(
            "this Python has no source text for the built-in corpus",
            where=f"data.source: built-in ({root})",
            why="the standard library is there in compiled form only",
            do="set data.source to files of your own, for instance texts/*.txt",
        )
    return tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))
