"""Text from files: .txt, .jsonl and .parquet, read as a stream, with the place of everything that is wrong.

csv_files.py and json_arrays.py read the other kinds, with the checks that stand here.

A .txt file is one document, whatever its size: blank lines are part of prose and code, so splitting there would
guess. A file that holds many documents can say so by spelling the tokenizer's end token between them (tokenizers read
it as that token), or be .jsonl. A .jsonl line and a .parquet row are a document each.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from coremill.data.bad_rows import BadRows, WrongColumn, another_cure
from coremill.data.conversations import ConversationForm, pair_among, without_nulls
from coremill.data.examples import ExampleForm
from coremill.data.pieces import PIECE_BYTES, Piece, cut_position, pieces_of_text
from coremill.errors import InputError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BATCH_ROWS = 1024  # of a column of text that is read at once

Wanted = str | ConversationForm | ExampleForm  # what is read of a row: a column of text, a conversation, an example


def read_txt(stream: BufferedReader, path: Path, bad: BadRows) -> Iterator[Piece]:
    """One document, cut into pieces as it is read; its rows are lines."""
    line, offset, carry = 1, 0, b""
    at_end = False
    while not at_end:
        data = carry + stream.read(PIECE_BYTES - len(carry))
        at_end = not stream.peek(1)
        cut = len(data) if at_end else cut_position(data)
        chunk, carry = data[:cut], data[cut:]
        content = chunk.removeprefix(BYTE_ORDER_MARK) if offset == 0 else chunk
        try:
            text = decoded(content, path, line, offset)
        except InputError as problem:
            if bad.policy == "stop":
                bad.take(problem)
            text = _good_lines(content, path, line, offset, bad)
        yield Piece(text, str(path), line, at_end, len(chunk))
        line += chunk.count(b"\n")
        offset += len(chunk)


def read_jsonl(stream: BufferedReader, path: Path, wanted: Wanted, bad: BadRows) -> Iterator[Piece]:
    """One document a line."""
    offset = 0
    for row, line in enumerate(stream, 1):
        content = line.removeprefix(BYTE_ORDER_MARK) if row == 1 else line
        if not content.isspace() and content:
            try:
                values = _object_of_line(content, wanted, path, row, offset)
                pieces = pieces_of_row(values, wanted, f"{path}:{row}", file=str(path), row=row, source_bytes=len(line))
            except InputError as problem:
                bad.take(problem)
            else:
                yield from pieces
        offset += len(line)


def _object_of_line(line: bytes, wanted: Wanted, path: Path, row: int, offset: int) -> dict[str, Any]:
    where = f"{path}:{row}"
    text = decoded(line, path, row, offset).rstrip("\r\n")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, a number of 5,000 digits, a thousand brackets
        place, why = where, str(error).partition(";")[0]
        if isinstance(error, json.JSONDecodeError):
            place, why = f"{where}, column {error.colno}", error.msg
        cure = another_cure(path) if row == 1 else None
        if cure is None and row == 1 and text.strip() == "[":
            cure = f"it is one JSON list: name it .json, or make lines of it: jq -c '.[]' {path.name}"
        cut_off = "" if line.endswith(b"\n") else "; the file may be cut off"
        raise InputError(
            "not a line of JSON",
            where=place,
            why=f"{why}; a .jsonl file has one JSON object a line",
            do=cure or f"repair or remove the line{cut_off}",
        ) from None
    if not isinstance(value, dict):
        raise InputError(
            f"the line holds {in_words(value)}, not an object",
            where=where,
            why="a .jsonl line must be an object whose keys are columns",
            do=f'write it as {{"{columns_of(wanted)[0]}": "..."}}',
        )
    return value


def columns_of(wanted: Wanted) -> tuple[str, ...]:
    """Those that every row must have."""
    return (wanted,) if isinstance(wanted, str) else wanted.columns


def columns_read(wanted: Wanted, there: Sequence[str], where: str) -> list[str]:
    """Those that are read of rows which have so many; InputError where one is missing."""
    for column in columns_of(wanted):
        if column not in there:
            raise missing_column(column, there, where, wanted)
    more = () if isinstance(wanted, str) else wanted.optional
    return [*columns_of(wanted), *(column for column in more if column in there)]


def pieces_of_row(
    values: Mapping[str, Any], wanted: Wanted, where: str, *, file: str, row: int, source_bytes: int
) -> Iterator[Piece]:
    """The document of a row, checked here and not where the pieces are used."""
    for column in columns_of(wanted):
        if column not in values:
            problem = missing_column(column, list(values), where, wanted)
            raise WrongColumn(problem.what, where=where, why=problem.why, do=problem.do) if row == 1 else problem
    if isinstance(wanted, str):
        text = checked_text(values[wanted], wanted, where)
        return pieces_of_text(text, file=file, row=row, source_bytes=source_bytes)
    if isinstance(wanted, ExampleForm):
        return iter([Piece("", file, row, True, source_bytes, example=wanted.read(values, where, row))])
    return iter([Piece("", file, row, True, source_bytes, wanted.read(values, where))])


def read_parquet(path: Path, wanted: Wanted, bad: BadRows, stream: BinaryIO | None = None) -> Iterator[Piece]:
    """One document a row, one row group after the other; `stream`: the file itself, where `path` is compressed."""
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(path if stream is None else stream)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged_parquet(path, error) from None
    with parquet:
        schema = parquet.schema_arrow
        columns = columns_read(wanted, schema.names, str(path))
        if isinstance(wanted, str):
            require_text_type(schema.field(wanted).type, wanted, str(path), schema)
        bytes_per_row = path.stat().st_size / max(1, parquet.metadata.num_rows)
        row = 0
        batches = parquet.iter_batches(batch_size=BATCH_ROWS, columns=columns)
        while True:
            try:
                batch = next(batches, None)
            except (pyarrow.ArrowException, OSError) as error:
                raise _damaged_parquet(path, error) from None
            if batch is None:
                return
            yield from pieces_of_arrow(batch, wanted, str(path), row, bytes_per_row, bad)
            row += len(batch)


def parquet_schema(path: Path) -> Any:
    """Of Arrow; InputError where it is no parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged_parquet(path, error) from None


def pieces_of_arrow(
    table: Any, wanted: Wanted, file: str, rows_before: int, bytes_per_row: float, bad: BadRows
) -> Iterator[Piece]:
    """The rows of an Arrow table or batch that has `rows_before` rows in front of it."""
    for row, values in enumerate(_arrow_rows(table), rows_before + 1):
        try:
            if isinstance(values, UnicodeDecodeError):
                raise InputError(
                    "the text is not UTF-8",
                    where=f"{file}:{row}",
                    why=f"{values.reason} at byte {values.start} of the value",
                    do="write the file again with its text encoded as UTF-8",
                )
            if not isinstance(wanted, str):  # Arrow gives every message, call and tool all keys that any has
                values = {column: without_nulls(value) for column, value in values.items()}
            share = int(row * bytes_per_row) - int((row - 1) * bytes_per_row)
            pieces = pieces_of_row(values, wanted, f"{file}:{row}", file=file, row=row, source_bytes=share)
        except InputError as problem:
            bad.take(problem)
        else:
            yield from pieces


def _arrow_rows(table: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows, or the error of one that is not UTF-8: Arrow itself never checks that."""
    try:
        yield from table.to_pylist()
    except UnicodeDecodeError:
        for index in range(len(table)):
            try:
                yield from table.slice(index, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield error


def checked_text(value: Any, column: str, where: str) -> str:
    """`value` where it is text that can be tokenised."""
    if not isinstance(value, str):
        raise InputError(
            f"column '{column}' holds {in_words(value)}, not text",
            where=where,
            why="every row must have a string to train on",
            do="remove such rows, or name another column in data.column",
        )
    if "\0" in value:
        raise _nul(where, f"at character {value.index(chr(0))} of the value")
    if not value.isascii():
        # JSON may spell half of a surrogate pair (\ud800): a Python string, but no text that UTF-8 can hold.
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"column '{column}' holds half a character",
                where=where,
                why=f"{error.reason} at character {error.start}",
                do="repair or remove the row",
            ) from None
    return value


def missing_column(column: str, columns: Sequence[str], where: str, wanted: Wanted = "") -> InputError:
    """An error that lists what there is."""
    near = difflib.get_close_matches(column, columns, n=1)
    listing = ", ".join(columns[:20]) + (", ..." if len(columns) > 20 else "")
    do = "set data.column (of one of data.sources: its column) to the one that holds the text"
    if isinstance(wanted, ExampleForm):
        do = wanted.cure_of_missing(column)
    elif not isinstance(wanted, str):
        do = "set data.messages_column, or data.prompt_column and data.answer_column, to those that hold conversations"
    elif (pair := pair_among(columns)) is not None:
        do += f"; for prompts with answers: data.prompt_column: {pair[0]} and data.answer_column: {pair[1]}"
    return InputError(
        f"there is no column '{column}'" + (f"; did you mean '{near[0]}'?" if near else ""),
        where=where,
        why=f"its columns are: {listing}" if columns else "it has no columns at all",
        do=do,
    )


def require_text_type(arrow_type: Any, column: str, where: str, schema: Any) -> None:
    """Refuse a column of another type from the header alone, before any row is read."""
    import pyarrow.types as types

    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if not (types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_string_view(arrow_type)):
        texts = [field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)]
        raise InputError(
            f"column '{column}' holds {arrow_type}, not text",
            where=where,
            why="its columns of text are: " + ", ".join(texts) if texts else "it has no column of text",
            do="set data.column to the one that holds the text",
        )


def decoded(data: bytes, path: Path, line: int, offset: int) -> str:
    """A stretch of a file as text; what is wrong with it has its line and byte."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad_line = line + data.count(b"\n", 0, error.start)
        raise InputError(
            "the text is not UTF-8",
            where=f"{path}:{bad_line}",
            why=f"{error.reason} at byte {offset + error.start} of the file",
            do=another_cure(path) or f"convert it, for instance: iconv -f latin1 -t utf-8 {path.name}",
        ) from None
    nul = data.find(b"\0")
    if nul >= 0:
        raise _nul(f"{path}:{line + data.count(bytes([10]), 0, nul)}", f"at byte {offset + nul} of the file")
    return text


def _good_lines(data: bytes, path: Path, line: int, offset: int, bad: BadRows) -> str:
    """The lines of a stretch of text that can be used; the others are taken."""
    kept = []
    for number, content in enumerate(data.splitlines(keepends=True), line):
        try:
            kept.append(decoded(content, path, number, offset))
        except InputError as problem:
            bad.take(problem)
        offset += len(content)
    return "".join(kept)


def _nul(where: str, place: str) -> InputError:
    return InputError(
        "the text holds a NUL character",
        where=where,
        why=f"{place}; UTF-16 and binary files read as text look like this",
        do="convert the file to UTF-8, or remove the row",
    )


def in_words(value: Any) -> str:
    """What kind of value of JSON this is."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", bytes: "bytes"}
    names |= {list: "a list", dict: "an object", str: "a string"}
    return names.get(type(value), type(value).__name__)


def _damaged_parquet(path: Path, error: Exception) -> InputError:
    size = path.stat().st_size
    return InputError(
        "not a whole parquet file",
        where=str(path),
        why=f"{str(error).splitlines()[0]} ({size:,} bytes on disk)",
        do=another_cure(path) or "copy or download the file again: it looks cut off or damaged",
    )
