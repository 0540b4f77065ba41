"""Text from .json files: one array of objects or of strings, read element by element; or one object a line.

Many a .json file holds lines of JSON: what begins with a brace is read as such. An array is never held whole: as much
is read as its next element needs. Where questions are wanted, SQuAD's own file is read too: one object, with articles,
paragraphs and questions inside each other.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

from coremill.data.bad_rows import BadRows, another_cure
from coremill.data.examples import ExampleForm
from coremill.data.files import BYTE_ORDER_MARK, Wanted, columns_of, in_words, pieces_of_row, read_jsonl
from coremill.data.pieces import Piece
from coremill.data.questions import nested_questions
from coremill.errors import InputError

BLOCK_BYTES = 1 << 18
# An element of more is no document any more: most likely a bracket or quote that is never closed.
ELEMENT_BYTES = 1 << 25
BLANKS = " \t\r\n"
# How near to the end of what was read an error must be for more text to cure it; a literal or escape is shorter.
UNFINISHED_CHARACTERS = 16


def read_json(stream: BufferedReader, path: Path, wanted: Wanted, bad: BadRows) -> Iterator[Piece]:
    """One document an element; their places are numbers of elements, from 1."""
    start = stream.peek(1).removeprefix(BYTE_ORDER_MARK).lstrip()
    if start[:1] == b"{":
        if isinstance(wanted, ExampleForm) and wanted.kind == "questions":
            yield from _read_questions(stream.read(), path, wanted, bad)
        else:
            yield from _read_lines(stream, path, wanted, bad)
        return
    elements, column = _Elements(stream, path), columns_of(wanted)[0]
    for number, value in enumerate(elements, 1):
        where = f"{path}, element {number} (line {elements.line})"
        try:
            if not isinstance(value, dict) and not (isinstance(value, str) and isinstance(wanted, str)):
                raise InputError(
                    f"the element is {in_words(value)}, not an object",
                    where=where,
                    why="the array must hold objects whose keys are columns, or strings",
                    do=f'write it as {{"{column}": "..."}}',
                )
            values = value if isinstance(value, dict) else {column: value}
            pieces = pieces_of_row(
                values, wanted, where, file=str(path), row=number, source_bytes=elements.unsaid_bytes
            )
        except InputError as problem:
            bad.take(problem)
        else:
            elements.take_bytes()
            yield from pieces


def first_element(stream: BufferedReader, path: Path) -> Any:
    """None where there is none."""
    return next(iter(_Elements(stream, path)), None)


def _read_lines(stream: BufferedReader, path: Path, wanted: Wanted, bad: BadRows) -> Iterator[Piece]:
    first = stream.peek(1).removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0].strip()
    if first == b"{":  # one object over many lines
        raise InputError(
            "the file holds one object, not an array",
            where=f"{path}:1",
            why="a .json file must be an array of objects or strings, or have one object a line",
            do=f"write the list inside it to a file of its own, for instance: jq .data {path.name} > rows.json",
        )
    yield from read_jsonl(stream, path, wanted, bad)


def _read_questions(content: bytes, path: Path, wanted: ExampleForm, bad: BadRows) -> Iterator[Piece]:
    """SQuAD's own file, or else lines."""
    assert wanted.id_column is not None
    try:
        document = json.loads(content.removeprefix(BYTE_ORDER_MARK))
        found = nested_questions(document, wanted.columns, wanted.id_column)
    except (ValueError, RecursionError):
        found = None
    if found is None:
        yield from _read_lines(BufferedReader(BytesIO(content)), path, wanted, bad)  # type: ignore[arg-type]
        return
    rows = list(found)
    for row, (place, values) in enumerate(rows, 1):
        where, share = f"{path}, {place}", len(content) * row // len(rows) - len(content) * (row - 1) // len(rows)
        try:
            if not isinstance(values, dict):
                do = 'write it as {"paragraphs": [{"context": "...", "qas": [...]}]}'
                raise InputError(f"here is {in_words(values)}, not an object", where=where, do=do)
            yield from pieces_of_row(values, wanted, where, file=str(path), row=row, source_bytes=share)
        except InputError as problem:
            bad.take(problem)


class _Elements:
    """The elements of the array, one after the other."""

    def __init__(self, stream: BufferedReader, path: Path) -> None:
        self._stream, self._path = stream, path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False
        self._line_at, self._lines = 0, 1  # how far lines are counted, and how many there are up to there
        self._bytes_read = self._bytes_told = 0
        self.line = 1  # of the element given last

    @property
    def unsaid_bytes(self) -> int:
        """How much was read since `take_bytes`."""
        return self._bytes_read - self._bytes_told

    def take_bytes(self) -> None:
        """They are accounted for."""
        self._bytes_told = self._bytes_read

    def __iter__(self) -> Iterator[Any]:
        opened = self._sign()
        if opened == "":
            return  # an empty file: the dataset is empty
        if opened != "[":
            raise self._damaged("not an array", f"it begins with {opened!r}")
        self._at += 1
        if self._sign() == "]":
            self._at += 1
        else:
            while True:
                self._sign()
                self.line = self._line_here()
                yield self._element()
                sign = self._sign()
                if sign not in (",", "]"):
                    found = repr(sign) if sign else "the end of the file"
                    raise self._damaged("not a whole array", f"a comma or ] should follow the element, not {found}")
                self._at += 1
                if sign == "]":
                    break
        if self._sign() != "":
            raise self._damaged("more than one array", "text follows the closing bracket")

    def _sign(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in BLANKS:
                    return self._text[self._at]
                self._at += 1
            if not self._read_more():
                return ""

    def _element(self) -> Any:
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if self._is_unfinished(error) and self._read_more():
                    continue
                place = error.pos if isinstance(error, json.JSONDecodeError) else self._at
                why = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]
                self._at = min(place, len(self._text))
                raise self._damaged("not JSON", why) from None
            if end == len(self._text) and not isinstance(value, dict | list | str) and self._read_more():
                continue  # a number may go on
            self._at = end
            return value

    def _is_unfinished(self, error: Exception) -> bool:
        if not isinstance(error, json.JSONDecodeError):
            return False
        if len(self._text) - self._at > ELEMENT_BYTES:
            return False
        near_the_end = error.pos >= len(self._text) - UNFINISHED_CHARACTERS
        return near_the_end or error.msg.startswith("Unterminated string")

    def _read_more(self) -> bool:
        """As much again as is waiting, so that a long element is not tried over and over; False at the end."""
        if self._ended:
            return False
        waiting = len(self._text) - self._at
        data = self._stream.read(max(BLOCK_BYTES, waiting))
        self._ended = not data
        first = self._bytes_read == 0
        self._bytes_read += len(data)
        self._lines, self._line_at = self._line_here(), 0
        self._text, self._at = self._text[self._at :], 0
        try:
            self._text += self._decoder.decode(data.removeprefix(BYTE_ORDER_MARK) if first else data, final=self._ended)
        except UnicodeDecodeError as error:
            line = self._lines + self._text.count("\n") + error.object[: error.start].count(b"\n")
            raise InputError(
                "the text is not UTF-8",
                where=f"{self._path}:{line}",
                why=error.reason,
                do=another_cure(self._path) or f"convert it, for instance: iconv -f latin1 -t utf-8 {self._path.name}",
            ) from None
        return bool(data)

    def _line_here(self) -> int:
        self._lines += self._text.count("\n", self._line_at, self._at)
        self._line_at = self._at
        return self._lines

    def _damaged(self, what: str, why: str) -> InputError:
        cut_off = "; the file may be cut off" if self._ended else ""
        return InputError(
            f"the .json file is {what}" if what.startswith("not") else f"the .json file holds {what}",
            where=f"{self._path}:{self._line_here()}",
            why=f"{why}; a .json file is one array of objects or strings, or has one object a line",
            do=another_cure(self._path) or f"repair it{cut_off}",
        )
