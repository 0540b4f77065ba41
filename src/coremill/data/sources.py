"""From `data.source` to a stream of documents: which text is meant, what identifies it, and how to read it.

Three steps, so that the first two cost little and can run in the launcher:

    resolve_source   which files, or which commit of a dataset; finds what does not exist
    identity_of      a hash of the content: it changes when the text changes, wherever the files lie
    open_text        the documents themselves, piece by piece (in the tokenising process)
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from coremill.config.schema import BUILT_IN
from coremill.data.bad_rows import BadRows, OnBadRows
from coremill.data.compressed import is_compressed, open_bytes
from coremill.data.conversations import ConversationForm
from coremill.data.csv_files import read_csv
from coremill.data.examples import ExampleForm
from coremill.data.file_kinds import FileKind, find_files
from coremill.data.files import Wanted, read_jsonl, read_parquet, read_txt
from coremill.data.hub_datasets import PREFIX, Dataset, open_dataset, resolve_dataset
from coremill.data.json_arrays import read_json
from coremill.data.pieces import Piece
from coremill.errors import InputError

HASH_BLOCK_BYTES = 1 << 22
_DATASET_ADDRESS = re.compile(r"https?://(?:huggingface\.co|hf\.co)/datasets/([\w.-]+(?:/[\w.-]+)?)")
# Not in the built-in corpus: installed packages, tests (17 MB of one kind) and IDLE.
LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """A source that was found; plain values, so that it can be handed to the tokenising process."""

    name: str  # as the user wrote it
    setting: str  # the key it was written under
    kind: FileKind | Literal["hub", "built-in"]
    column: str
    files: tuple[str, ...] = ()
    dataset: Dataset | None = None
    on_bad_rows: OnBadRows = "stop"
    conversations: ConversationForm | None = None  # how its rows hold them; None: it is text
    examples: ExampleForm | None = None  # likewise, for tasks that read examples

    @property
    def wanted(self) -> Wanted:
        """What is read of its rows."""
        return self.examples or self.conversations or self.column

    @property
    def where(self) -> str:
        return f"{self.setting}: {self.name}"

    @property
    def file_names(self) -> tuple[str, ...]:
        """What its pieces name as their file."""
        return (self.dataset.label,) if self.dataset is not None else tuple(str(Path(file)) for file in self.files)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TextSource:
        dataset, form = document["dataset"], document.get("conversations")
        found = None if dataset is None else Dataset(**dataset)
        read = None if form is None else ConversationForm(**{**form, "columns": tuple(form["columns"])})
        values = {**document, "files": tuple(document["files"]), "dataset": found, "conversations": read}
        if (examples := document.get("examples")) is not None:
            lists = {name: tuple(examples[name]) for name in ("columns", "settings")}
            values["examples"] = ExampleForm(**{**examples, **lists})
        return cls(**values)


@dataclass(frozen=True)
class OpenedText:
    """Documents as a stream, and how much there is where that is known."""

    pieces: Iterator[Piece]
    bytes_total: int | None
    bad: BadRows = field(default_factory=BadRows)  # filled while the pieces are read, as these are
    notes: list[str] = field(default_factory=list)  # how files are read, where that needs words


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
            else "use hf://[owner/]name[:config][@revision], local files (a path, glob or folder), or built-in",
        )
    kind, files = find_files(name, setting)
    return TextSource(kind=kind, files=files, **how)


def identity_of(source: TextSource, on_bytes: Callable[[int], None] | None = None) -> str:
    """What the text is, wherever it lies: a hash over kind, column and the content of all files, or over a commit."""
    digest = hashlib.blake2b(digest_size=20)
    read = source.wanted if isinstance(source.wanted, str) else repr(source.wanted.identity)
    if source.dataset is not None:
        digest.update(repr(("hub", read, *source.dataset.identity)).encode())
        return digest.hexdigest()
    # Plain text has no columns, so a changed data.column must not tokenise it again.
    digest.update(repr((source.kind, "" if source.kind in ("txt", "built-in") else read)).encode())
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
        pieces, bytes_total = open_dataset(source.dataset, wanted=source.wanted, where=source.where, bad=bad)
        return OpenedText(pieces, bytes_total, bad)
    notes: list[str] = []
    bytes_total = sum(Path(file).stat().st_size for file in source.files)
    return OpenedText(_read_files(source, bad, notes), bytes_total, bad, notes)


def _read_files(source: TextSource, bad: BadRows, notes: list[str]) -> Iterator[Piece]:
    for path in map(Path, source.files):
        if source.kind == "built-in":
            try:
                with open_bytes(path) as stream:
                    yield from list(read_txt(stream, path, BadRows()))
            except InputError:  # not UTF-8: left out of the built-in corpus
                continue
        elif is_compressed(path):
            yield from _read_compressed(source, path, bad, notes)
        elif source.kind == "parquet":
            yield from read_parquet(path, source.wanted, bad)
        else:
            with open_bytes(path) as stream:
                yield from _read_stream(stream, source, path, bad, notes)


def _read_stream(
    stream: BufferedReader, source: TextSource, path: Path, bad: BadRows, notes: list[str]
) -> Iterator[Piece]:
    if source.kind == "txt":
        return read_txt(stream, path, bad)
    if source.kind == "jsonl":
        return read_jsonl(stream, path, source.wanted, bad)
    if source.kind == "json":
        return read_json(stream, path, source.wanted, bad)
    assert source.kind in ("csv", "tsv")
    return read_csv(stream, path, source.wanted, bad, kind=source.kind, say=notes.append)


def _read_compressed(source: TextSource, path: Path, bad: BadRows, notes: list[str]) -> Iterator[Piece]:
    """A piece accounts for what was read of the file as it lies on disk: progress is counted in that."""
    position = told = 0

    def on_read(read_bytes: int) -> None:
        nonlocal position
        position = read_bytes

    with open_bytes(path, on_read) as stream:
        if source.kind == "parquet":  # whose footer comes first: unpacked into a file that has no name
            with tempfile.TemporaryFile() as unpacked:
                shutil.copyfileobj(stream, unpacked)
                yield from read_parquet(path, source.wanted, bad, unpacked)
            return
        for piece in _read_stream(stream, source, path, bad, notes):
            yield replace(piece, source_bytes=position - told)
            told = position


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
