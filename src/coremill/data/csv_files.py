"""Text from .csv and .tsv files: a header of column names, then a document a row; quoted fields may span lines.

The separator is the comma of .csv and the tab of .tsv. A .csv whose header has the wanted column only when it is cut at
semicolons (spreadsheets of half of Europe write them) is read so, and that is said. Quotes are taken strictly: one
that is not closed would swallow the rows behind it without a word.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Literal

from coremill.data.bad_rows import BadRows, another_cure
from coremill.data.files import BYTE_ORDER_MARK, Wanted, columns_of, columns_read, pieces_of_row
from coremill.data.pieces import Piece
from coremill.errors import InputError

# Far above any document; a quote that is never closed is found here, not at the end of memory.
FIELD_CHARACTERS = 1 << 25
SEPARATORS = {"csv": ",", "tsv": "\t"}
SEPARATOR_WORDS = {",": "commas", "\t": "tabs", ";": "semicolons"}


def read_csv(
    stream: BufferedReader,
    path: Path,
    wanted: Wanted,
    bad: BadRows,
    *,
    kind: Literal["csv", "tsv"],
    say: Callable[[str], None],
) -> Iterator[Piece]:
    """One document a row; a row's place is the line it begins on. `say` is told how the file is read, where unusual."""
    csv.field_size_limit(FIELD_CHARACTERS)
    lines = _Lines(stream)
    header_line = next(lines, "")
    if not header_line.strip():
        raise _without_header(path)
    separator = _separator(header_line, columns_of(wanted), kind)
    if separator != SEPARATORS[kind]:
        listed = " and ".join(f"'{column}'" for column in columns_of(wanted))
        say(f"{path.name} is read with semicolons between its columns: so its header has {listed}")
    lines.give_back(header_line)
    rows = csv.reader(lines, delimiter=separator, strict=True)
    header = _next_row(rows, path, 1)
    assert header is not None
    names = [name.strip() for name in header]
    try:
        columns = columns_read(wanted, names, f"{path}:1")
    except InputError as problem:
        problem.why = f"{problem.why} (the first line, cut at {SEPARATOR_WORDS[separator]})"
        problem.do = another_cure(path) or problem.do
        raise
    indices = {column: names.index(column) for column in columns}
    while True:
        began, read_before = rows.line_num + 1, lines.bytes_read
        row = _next_row(rows, path, began)
        if row is None:
            return
        if not row:  # a blank line
            continue
        try:
            where, read = f"{path}:{began}", lines.bytes_read - read_before
            _require_fields(row, len(names), where, SEPARATOR_WORDS[separator])
            values = {column: _decoded(row[index], column, where) for column, index in indices.items()}
            pieces = pieces_of_row(values, wanted, where, file=str(path), row=began, source_bytes=read)
        except InputError as problem:
            bad.take(problem)
        else:
            yield from pieces


class _Lines:
    """The lines of a file as text; bytes that are not UTF-8 become half characters, which their row is asked about."""

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream
        self._given_back: str | None = None
        self.bytes_read = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self._given_back is not None:
            line, self._given_back = self._given_back, None
            return line
        data = next(self._stream)
        data = data.removeprefix(BYTE_ORDER_MARK) if self.bytes_read == 0 else data
        self.bytes_read += len(data)
        return data.decode("utf-8", "surrogateescape")

    def give_back(self, line: str) -> None:
        self._given_back = line


def _separator(header_line: str, columns: Sequence[str], kind: Literal["csv", "tsv"]) -> str:
    usual = SEPARATORS[kind]
    if kind == "csv" and ";" in header_line:
        names = {sign: {name.strip(' "\r\n') for name in header_line.split(sign)} for sign in (usual, ";")}
        if not set(columns) <= names[usual] and set(columns) <= names[";"]:
            return ";"
    return usual


def _next_row(rows: Iterator[list[str]], path: Path, began: int) -> list[str] | None:
    """None at the end. A quote in the wrong place cannot be skipped: what follows it would be read wrongly."""
    try:
        return next(rows, None)
    except csv.Error as error:
        what, why = "the quotes of this row do not fit", str(error)
        if "end of data" in why or "field limit" in why:
            what = "a quote that is opened here is never closed"
            why = f"everything behind it would be part of one field, which has at most {FIELD_CHARACTERS:,} characters"
        raise InputError(
            what,
            where=f"{path}:{began}",
            why=f"{why}; a field that holds a quote, a separator or a line break stands in quotes, and each quote"
            ' inside it is written twice ("")',
            do=another_cure(path) or "repair the row, or write the file again with a library that quotes (pandas, csv)",
        ) from None


def _require_fields(row: list[str], columns: int, where: str, separator: str) -> None:
    if len(row) != columns:
        raise InputError(
            f"the row has {len(row)} field{'s' if len(row) != 1 else ''}, and the header {columns}",
            where=where,
            why=f"its fields are cut at {separator}",
            do="put quotes around text that holds the separator, or remove the row",
        )


def _decoded(value: str, column: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # a csv has no escapes: these are bytes that _Lines could not read
            byte = ord(value[error.start]) - 0xDC00
            raise InputError(
                "the text is not UTF-8",
                where=where,
                why=f"byte 0x{byte:02x} in column '{column}'",
                do="convert the file, for instance: iconv -f latin1 -t utf-8",
            ) from None
    return value


def _without_header(path: Path) -> InputError:
    return InputError(
        "the file has no header",
        where=f"{path}:1",
        why="its first line is empty; it has to name the columns",
        do=another_cure(path) or "write the names of the columns in the first line, for instance: text",
    )
