"""The catalogue of bad data: each case is refused with its file, row, reason and cure, before a rank starts.

Cases run through the whole data stage, its child's job in this process; a few also through the real command line
(tests/end_to_end/test_bad_input.py). `rows` is how many rows `data.on_bad_rows: skip` leaves out; None: the file itself
is bad, which no setting excuses.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from coremill.config.schema import RunConfig
from coremill.data import tokenise as prepare
from coremill.data.bad_rows import LISTING_FILE
from coremill.data.packed import TOKENS_FILE, PackedData
from coremill.data.tokenise import check_sources, prepare_data, require_rows_for_ranks
from coremill.data.tokenise_child import Speaker, do_job
from coremill.errors import InputError

GOOD = [f"document {index} holds some words about the mill and the store" for index in range(6)]
LINES = [json.dumps({"text": text}).encode() + b"\n" for text in GOOD]
Content = bytes | Callable[[Path], None]


def lines_with(bad: bytes, at: int = 3) -> bytes:
    """A .jsonl file whose row `at` is bad."""
    return b"".join([*LINES[: at - 1], bad, *LINES[at - 1 :]])


def table_lines(bad: bytes) -> bytes:
    """A .csv file whose fourth line is bad."""
    rows = [f"{index},{text}\n".encode() for index, text in enumerate(GOOD)]
    return b"".join([b"id,text\n", *rows[:2], bad, *rows[2:]])


def array_with(bad: bytes) -> bytes:
    """A .json file whose third element, on line 5, is bad."""
    good = [line.strip() for line in LINES]
    return b"[" + b",\n\n".join([*good[:2], bad, *good[2:]]) + b"]\n"


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))


def table(**columns: Any) -> Callable[[Path], None]:
    return lambda path: pyarrow.parquet.write_table(pyarrow.table(columns), path)


def cut(content: Callable[[Path], None], keep: float) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content(path)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])

    return write


def strings(*values: bytes) -> pyarrow.Array:
    """Text that Arrow believes to be UTF-8."""
    return pyarrow.array(list(values), pyarrow.binary()).view(pyarrow.string())


def damaged_inside(path: Path) -> None:
    """Sound at both ends, rubbish where the pages are."""
    table(text=pyarrow.array(GOOD * 50))(path)
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)


@dataclass(frozen=True)
class Case:
    files: dict[str, Content]
    where: str  # regular expressions
    what: str
    do: str
    rows: int | None = None
    source: str = "*"
    data: dict[str, Any] = field(default_factory=dict)
    vocabulary_rows: int = 300
    ranks: int = 1
    max_positions: int | None = None


CASES = {
    # --- rows of .jsonl ---
    "invalid UTF-8": Case(
        {"a.jsonl": lines_with(b'{"text": "caf\xe9"}\n')}, "a.jsonl:3", "not UTF-8", "iconv -f latin1", 1
    ),
    "broken JSON": Case(
        {"a.jsonl": lines_with(b'{"text": "x"\n')}, "a.jsonl:3, column 13", "not a line of JSON", "repair or remove", 1
    ),
    "cut off last line": Case(
        {"a.jsonl": b"".join(LINES) + b'{"text": "mi'}, "a.jsonl:7", "not a line of JSON", "may be cut off", 1
    ),
    "two objects on a line": Case(
        {"a.jsonl": lines_with(b'{"text": "a"}{"text": "b"}\n')},
        "a.jsonl:3, column 14",
        "not a line of JSON",
        "repair",
        1,
    ),
    "single quotes": Case(
        {"a.jsonl": lines_with(b"{'text': 'a'}\n")}, "a.jsonl:3, column 2", "not a line of JSON", "repair", 1
    ),
    "raw control character": Case(
        {"a.jsonl": lines_with(b'{"text": "a\tb"}\n')}, "a.jsonl:3", "not a line of JSON", "repair", 1
    ),
    "a list, not an object": Case(
        {"a.jsonl": lines_with(b'["text"]\n')}, "a.jsonl:3", "holds a list, not an object", r'write it as \{"text"', 1
    ),
    "bare text": Case(
        {"a.jsonl": lines_with(b'"just text"\n')}, "a.jsonl:3", "holds a string, not an object", "write it as", 1
    ),
    "no such column in a row": Case(
        {"a.jsonl": lines_with(b'{"body": "x"}\n')}, "a.jsonl:3", "no column 'text'", "data.column", 1
    ),
    "misspelt column in a row": Case(
        {"a.jsonl": lines_with(b'{"texts": "x"}\n')}, "a.jsonl:3", "did you mean 'texts'", "data.column", 1
    ),
    "empty object": Case({"a.jsonl": lines_with(b"{}\n")}, "a.jsonl:3", "no column 'text'", "data.column", 1),
    "null text": Case(
        {"a.jsonl": lines_with(b'{"text": null}\n')}, "a.jsonl:3", "holds null, not text", "remove such rows", 1
    ),
    "a number as text": Case(
        {"a.jsonl": lines_with(b'{"text": 7}\n')}, "a.jsonl:3", "holds a number", "remove such rows", 1
    ),
    "a list as text": Case(
        {"a.jsonl": lines_with(b'{"text": ["a", "b"]}\n')}, "a.jsonl:3", "holds a list", "remove such rows", 1
    ),
    "nested text": Case(
        {"a.jsonl": lines_with(b'{"text": {"en": "a"}}\n')}, "a.jsonl:3", "holds an object", "remove such rows", 1
    ),
    "half a character": Case(
        {"a.jsonl": lines_with(b'{"text": "a\\ud800"}\n')}, "a.jsonl:3", "half a character", "repair or remove", 1
    ),
    "NUL escaped": Case({"a.jsonl": lines_with(b'{"text": "a\\u0000b"}\n')}, "a.jsonl:3", "NUL", "remove the row", 1),
    "NUL bytes": Case({"a.jsonl": lines_with(b'{"text": "a"}\0\0\0\n')}, "a.jsonl:3", "NUL", "remove the row", 1),
    "a number of 5,000 digits": Case(
        {"a.jsonl": lines_with(b'{"n": ' + b"1" * 5000 + b', "text": "a"}\n')},
        "a.jsonl:3",
        "not a line of JSON",
        "repair",
        1,
    ),
    "100,000 brackets": Case(
        {"a.jsonl": lines_with(b"[" * 100_000 + b"\n")}, "a.jsonl:3", "not a line of JSON", "repair", 1
    ),
    "bad in the second file": Case(
        {"a.jsonl": b"".join(LINES), "b.jsonl": lines_with(b"{\n", 2)}, "b.jsonl:2", "not a line of JSON", "repair", 1
    ),
    "several bad rows": Case(
        {"a.jsonl": lines_with(b'{\n{"text": null}\n\xff\n')}, "a.jsonl:3", "not a line of JSON", "repair", 3
    ),
    "all rows bad": Case({"a.jsonl": b'{"body": "x"}\n' * 5}, "a.jsonl:1", "no column 'text'", "data.column"),
    # --- files that are something else ---
    "one JSON list": Case(
        {"a.jsonl": b'[\n{"text": "a"},\n{"text": "b"}\n]\n'}, "a.jsonl:1", "not a line of JSON", "jq -c"
    ),
    "gzip": Case({"a.jsonl": gzip.compress(b"".join(LINES))}, "a.jsonl:1", "not UTF-8", "gunzip"),
    "UTF-16": Case({"a.txt": "some words".encode("utf-16")}, "a.txt:1", "not UTF-8", "iconv -f utf-16"),
    "UTF-16 without a mark": Case({"a.txt": "some words".encode("utf-16-le")}, "a.txt:1", "NUL", "UTF-8"),
    "a web page": Case({"a.jsonl": b"<!DOCTYPE html>\n<html>\n"}, "a.jsonl:1", "not a line of JSON", "web page"),
    "a pointer of git-lfs": Case(
        {"a.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
        "a.parquet",
        "not a whole parquet",
        "git lfs pull",
    ),
    # --- compressed ---
    "gzip cut off": Case(
        {"a.jsonl.gz": gzip.compress(b"".join(LINES * 200))[:-100]}, "a.jsonl.gz", "not a whole .gz", "again"
    ),
    "zstd cut off": Case(
        {"a.jsonl.zst": zstd(b"".join(LINES * 200))[:-20]}, "a.jsonl.zst", "not a whole .zst", "again"
    ),
    "not gzip": Case({"a.jsonl.gz": b"".join(LINES)}, "a.jsonl.gz", "not a whole .gz", "take .gz off its name"),
    "bad row in gzip": Case(
        {"a.jsonl.gz": gzip.compress(lines_with(b"{\n"))}, "a.jsonl.gz:3", "not a line of JSON", "repair", 1
    ),
    # --- .csv and .tsv ---
    "empty csv": Case({"a.csv": b""}, "a.csv:1", "no header", "names of the columns"),
    "header only": Case({"a.csv": b"id,text\n"}, "data.source", "dataset is empty", "name files with text"),
    "no such column in csv": Case(
        {"a.csv": b"id,texts\n1,x\n"}, "a.csv:1", "no column 'text'; did you mean 'texts'", "data.column"
    ),
    "a comma that is not quoted": Case(
        {"a.csv": table_lines(b"7,well, well\n")}, "a.csv:4", "row has 3 fields, and the header 2", "quotes around", 1
    ),
    "a row that is short": Case({"a.csv": table_lines(b"7\n")}, "a.csv:4", "row has 1 field, and", "quotes around", 1),
    "invalid UTF-8 in csv": Case({"a.csv": table_lines(b"7,caf\xe9\n")}, "a.csv:4", "not UTF-8", "iconv", 1),
    "NUL in csv": Case({"a.csv": table_lines(b"7,a\0b\n")}, "a.csv:4", "NUL", "remove the row", 1),
    "bad behind a quoted line break": Case(
        {"a.csv": table_lines(b'6,"two\nlines"\n7,caf\xe9\n')}, "a.csv:6", "not UTF-8", "iconv", 1
    ),
    "a quote that is never closed": Case({"a.csv": table_lines(b'7,"open\n')}, "a.csv:4", "never closed", "repair"),
    "a quote inside a field": Case(
        {"a.tsv": b'text\n"Oh" he said\n'}, "a.tsv:2", "quotes of this row do not fit", "repair the row"
    ),
    "UTF-16 csv": Case({"a.csv": "text\nx\n".encode("utf-16")}, "a.csv:1", "no column", "iconv -f utf-16"),
    # --- .json ---
    "no array": Case({"a.json": b'"text"'}, "a.json:1", "not an array", "repair"),
    "one object": Case({"a.json": b'{\n "data": []\n}'}, "a.json:1", "one object, not an array", "jq .data"),
    "an array cut off": Case({"a.json": b"[\n" + b",".join(LINES)}, "a.json:8", "not a whole array", "may be cut off"),
    "a comma too many": Case({"a.json": b'[\n{"text": "a"},\n]'}, "a.json:3", "not JSON", "repair"),
    "two arrays": Case({"a.json": b'["a"]\n["b"]'}, "a.json:2", "more than one array", "repair"),
    "no such column in an element": Case(
        {"a.json": array_with(b'{"body": "x"}')}, r"a.json, element 3 \(line 5\)", "no column 'text'", "data.column", 1
    ),
    "a number as an element": Case(
        {"a.json": array_with(b"17")}, r"a.json, element 3", "the element is a number", "write it as", 1
    ),
    "null in an element": Case(
        {"a.json": array_with(b'{"text": null}')}, r"a.json, element 3", "holds null, not text", "remove such rows", 1
    ),
    "invalid UTF-8 in json": Case({"a.json": array_with(b'"caf\xe9"')}, "a.json:5", "not UTF-8", "iconv"),
    # --- .txt ---
    "latin1 line in prose": Case(
        {"a.txt": b"first line\nsecond caf\xe9\n" + b"a third line that is long enough\n" * 3},
        "a.txt:2",
        "not UTF-8",
        "iconv",
        1,
    ),
    "NUL in prose": Case(
        {"a.txt": b"first\nsec\0ond\n" + b"a third line that is long enough\n" * 3}, "a.txt:2", "NUL", "UTF-8", 1
    ),
    # --- .parquet ---
    "truncated parquet": Case({"a.parquet": cut(table(text=GOOD), 0.7)}, "a.parquet", "not a whole parquet", "again"),
    "empty parquet file": Case({"a.parquet": b""}, "a.parquet", "not a whole parquet", "again"),
    "damaged inside": Case({"a.parquet": damaged_inside}, "a.parquet", "not a whole parquet", "again"),
    "no such column": Case({"a.parquet": table(body=GOOD)}, "a.parquet", "no column 'text'", "data.column"),
    "columns differ between files": Case(
        {"a.parquet": table(text=GOOD), "b.parquet": table(body=GOOD)}, "b.parquet", "no column 'text'", "data.column"
    ),
    "types differ between files": Case(
        {"a.parquet": table(text=GOOD), "b.parquet": table(text=[1, 2])},
        "b.parquet",
        "holds int64, not text",
        "data.column",
    ),
    "numbers": Case({"a.parquet": table(text=[1, 2])}, "a.parquet", "holds int64, not text", "data.column"),
    "bytes": Case({"a.parquet": table(text=[b"a", b"b"])}, "a.parquet", "holds binary, not text", "data.column"),
    "nested column": Case(
        {"a.parquet": table(text=[{"en": "a"}])}, "a.parquet", "holds struct.*, not text", "data.column"
    ),
    "list column": Case(
        {"a.parquet": table(text=[["a"], ["b"]])}, "a.parquet", "holds list.*, not text", "data.column"
    ),
    "null row": Case(
        {"a.parquet": table(text=pyarrow.array([*GOOD[:2], None, *GOOD[2:]]))},
        "a.parquet:3",
        "holds null",
        "remove such rows",
        1,
    ),
    "invalid UTF-8 in parquet": Case(
        {"a.parquet": table(text=strings(*(text.encode() for text in GOOD), b"caf\xe9"))},
        "a.parquet:7",
        "not UTF-8",
        "encoded as UTF-8",
        1,
    ),
    "no rows in parquet": Case(
        {"a.parquet": table(text=pyarrow.array([], pyarrow.string()))},
        r"data.source: .*/\*",
        "dataset is empty",
        "name files with text",
    ),
    # --- the whole of it ---
    "empty file": Case({"a.jsonl": b""}, "data.source", "dataset is empty", "name files with text"),
    "blank lines only": Case({"a.jsonl": b"\n\n \n"}, "data.source", "dataset is empty", "name files with text"),
    "empty texts only": Case(
        {"a.jsonl": b'{"text": ""}\n{"text": "  "}\n'}, "data.source", "dataset is empty", "data.column"
    ),
    "only a byte order mark": Case(
        {"a.txt": b"\xef\xbb\xbf"}, "data.source", "dataset is empty", "name files with text"
    ),
    "mixed kinds": Case({"a.jsonl": LINES[0], "b.txt": b"x"}, "data.source", "different kinds", "glob for one kind"),
    "unknown kind": Case({"a.pdf": b"text\nx\n"}, "data.source", "not a kind of file", "convert it"),
    "unknown compression": Case({"a.jsonl.bz2": b"BZh9"}, "data.source", "packed in a way", "bunzip2 a.jsonl.bz2"),
    "an archive": Case({"a.tar.gz": gzip.compress(b"x")}, "data.source", "packed in a way", "tar -xf"),
    "too little for a row": Case(
        {"a.jsonl": LINES[0]}, "data.source", "fills no row", "add text", data={"sequence_length": 4096}
    ),
    "too few rows for evaluation": Case(
        {"a.jsonl": b"".join(LINES[:2])},
        "data.evaluation_fraction",
        "one row cannot be shared",
        "add text",
        data={"sequence_length": 64, "evaluation_fraction": 0.1},
    ),
    "fewer rows than ranks": Case(
        {"a.jsonl": b"".join(LINES[:2])},
        "data.source and parallel",
        "fewer rows than there are ranks",
        "start at most",
        data={"sequence_length": 16},
        ranks=64,
    ),
    "token beyond the vocabulary": Case(
        {"a.jsonl": b"".join(LINES)},
        "tokenizer: .*, at .*",
        "beyond the model's embedding of 60 rows",
        "leave the key tokenizer out",
        vocabulary_rows=60,
    ),
    "rows beyond the positions": Case(
        {"a.jsonl": b"".join(LINES)},
        "data.sequence_length: 8",
        "longer than the model's 4 positions",
        "or less",
        max_positions=4,
    ),
    "evaluation text bad": Case(
        {"a.jsonl": b"".join(LINES), "held.jsonl": lines_with(b"{\n")},
        "held.jsonl:3",
        "not a line of JSON",
        "repair",
        1,
        source="a.jsonl",
        data={"evaluation_source": "held.jsonl"},
    ),
}

# Odd, and nothing wrong with it: the documents that come out.
ODD_BUT_GOOD = {
    "CRLF": ({"a.jsonl": b'{"text": "one two three"}\r\n\r\n{"text": "four five six"}\r\n'}, 2),
    "byte order mark": ({"a.jsonl": b"\xef\xbb\xbf" + b"".join(LINES)}, 6),
    "no line end at the end": ({"a.jsonl": b"".join(LINES).rstrip()}, 6),
    "a line of 10 MB": ({"a.jsonl": json.dumps({"text": "mill " * 2_000_000}).encode() + b"\n"}, 1),
    "1 MB without a blank": ({"a.txt": b"m" * 1_000_000}, 1),
    "an empty file among others": ({"a.jsonl": b"".join(LINES), "b.jsonl": b""}, 6),
    "other columns differ": (
        {"a.jsonl": b'{"text": "one two three", "n": 1}\n{"n": "x", "text": "four five six"}\n'},
        2,
    ),
    "dictionary-encoded parquet": ({"a.parquet": table(text=pyarrow.array(GOOD).dictionary_encode())}, 6),
    "gzip": ({"a.jsonl.gz": gzip.compress(b"".join(LINES))}, 6),
    "zstd": ({"a.jsonl.zst": zstd(b"".join(LINES))}, 6),
    "compressed and not": ({"a.jsonl.gz": gzip.compress(b"".join(LINES)), "b.jsonl": b"".join(LINES)}, 12),
    "csv with a mark, CRLF and quotes": (
        {"a.csv": b'\xef\xbb\xbfid,text\r\n1,"one, ""two"",\r\n\r\nthree"\r\n\r\n2,four five six\r\n'},
        2,
    ),
    "semicolons": ({"a.csv": b'id;"text"\n1;one, two, three\n2;four five six\n'}, 2),
    "tabs": ({"a.tsv": b"id\ttext\n1\tone, two, three\n2\tfour five six"}, 2),
    "an array of strings": ({"a.json": json.dumps(GOOD).encode()}, 6),
    "an array of objects": ({"a.json": b"\xef\xbb\xbf [" + b",".join(LINES) + b"] \n"}, 6),
    "an empty array among others": ({"a.json": b"[]", "b.json": b"[" + b",".join(LINES) + b"]"}, 6),
    "lines in a .json": ({"a.json": b"".join(LINES)}, 6),
    "large strings": ({"a.parquet": table(text=pyarrow.array(GOOD, pyarrow.large_string()))}, 6),
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: dict[str, Any], on_progress: object = None) -> dict[str, Any]:
        with Path("/dev/null").open("wb") as nowhere:
            return do_job(job, Speaker(nowhere))

    monkeypatch.setattr(prepare, "run_in_child", run)


def prepared(case: Case, folder: Path, tokenizer_folder: Path, **data: Any) -> PackedData:
    """The data stage as the launcher goes through it."""
    for name, content in case.files.items():
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content)
    section = {"source": str(folder / case.source), "sequence_length": 8, **case.data, **data}
    if "evaluation_source" in section:
        section["evaluation_source"] = str(folder / section["evaluation_source"])
    config = RunConfig.model_validate({"data": section})
    check_sources(config.data, max_positions=case.max_positions)
    packed = prepare_data(
        config,
        tokenizer_folder=tokenizer_folder,
        vocabulary_rows=case.vocabulary_rows,
        max_positions=case.max_positions,
        cache=folder / "cache",
    )
    require_rows_for_ranks(packed, case.ranks)
    return packed


@pytest.mark.parametrize("name", CASES)
def test_refused_with_file_row_reason_and_cure(tmp_path: Path, tokenizer_folder: Path, name: str) -> None:
    case = CASES[name]
    with pytest.raises(InputError) as caught:
        prepared(case, tmp_path, tokenizer_folder)
    problem = caught.value
    assert problem.exit_code == 78
    assert re.search(case.what, problem.what), problem
    assert problem.where and re.search(f"{case.where}$|{case.where}(?!\\d)", problem.where), problem
    assert problem.do and re.search(case.do, problem.do), problem
    assert "\n" not in f"{problem.what}{problem.where}{problem.why}{problem.do}" and len(str(problem)) < 1000
    assert (case.rows is None) or "data.on_bad_rows=skip" in problem.do


@pytest.mark.parametrize("name", CASES)
def test_skip_leaves_the_rows_out_and_counts_them(tmp_path: Path, tokenizer_folder: Path, name: str) -> None:
    case = CASES[name]
    if case.rows is None:
        with pytest.raises(InputError):
            prepared(case, tmp_path, tokenizer_folder, on_bad_rows="skip")
        return
    packed = prepared(case, tmp_path, tokenizer_folder, on_bad_rows="skip")
    folder = packed.folder if packed.evaluation_folder is None else packed.evaluation_folder
    listing = folder / LISTING_FILE
    listed = [json.loads(line) for line in listing.read_text().splitlines()]
    assert packed.bad_rows == len(listed) == case.rows
    assert re.search(case.where, listed[0]["where"]) and re.search(case.what, listed[0]["what"])
    assert str(listing) in packed.bad_rows_words and f"{case.rows} bad row" in packed.bad_rows_words


def test_skipping_is_deterministic_and_part_of_the_key(tmp_path: Path, tokenizer_folder: Path) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    good.mkdir()
    rows = [b'{"text": null}\n', b"\xff\n", b"{\n"]
    mixed = Case({"a.jsonl": b"".join(part for pair in zip(rows, LINES, strict=False) for part in pair)}, "", "", "")
    clean = Case({"a.jsonl": b"".join(LINES[:3])}, "", "", "")
    first = prepared(mixed, bad, tokenizer_folder, on_bad_rows="skip")
    again = prepared(mixed, bad, tokenizer_folder, on_bad_rows="skip")
    reference = prepared(clean, good, tokenizer_folder)
    assert again.from_cache and again.bad_rows == first.bad_rows == 3
    tokens = [np.fromfile(packed.folder / TOKENS_FILE, np.uint16).tolist() for packed in (first, reference)]
    assert tokens[0] == tokens[1]
    assert first.key != reference.key
    assert prepared(clean, good, tokenizer_folder, on_bad_rows="skip").key != reference.key


@pytest.mark.parametrize("name", ODD_BUT_GOOD)
def test_odd_but_good(tmp_path: Path, tokenizer_folder: Path, name: str) -> None:
    files, documents = ODD_BUT_GOOD[name]
    packed = prepared(Case(files, "", "", ""), tmp_path, tokenizer_folder)
    assert (packed.documents, packed.bad_rows) == (documents, 0)


def test_the_catalogue_is_long_enough():
    assert len(CASES) >= 30
