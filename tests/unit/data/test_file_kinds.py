"""Kinds of files beside .txt, .jsonl and .parquet: what is read of them, bit by bit, wherever blocks end."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.data import json_arrays
from coremill.data.bad_rows import BadRows
from coremill.data.csv_files import read_csv
from coremill.data.json_arrays import read_json
from coremill.data.pieces import Piece
from coremill.data.sources import identity_of, open_text, resolve_source
from coremill.errors import InputError

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=40)


def texts(pieces: list[Piece]) -> list[str]:
    whole, open_document = [], ""
    for piece in pieces:
        open_document += piece.text
        if piece.ends_document:
            whole.append(open_document)
            open_document = ""
    return whole


def read(source: object) -> list[str]:
    return texts(list(open_text(resolve_source(str(source), column="text", split="train")).pieces))


def problem(source: object) -> InputError:
    with pytest.raises(InputError) as caught:
        read(source)
    return caught.value


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(TEXT, min_size=1, max_size=8), block=st.integers(1, 64), escaped=st.booleans())
def test_an_array_is_the_same_wherever_blocks_end(rows: list[str], block: int, escaped: bool) -> None:
    document = [row if index % 2 else {"id": index, "text": row} for index, row in enumerate(rows)]
    data = json.dumps(document, ensure_ascii=escaped, indent=block % 3 or None).encode()
    small = json_arrays.BLOCK_BYTES
    json_arrays.BLOCK_BYTES = block
    try:
        pieces = list(read_json(io.BufferedReader(io.BytesIO(data)), Path("x.json"), "text", BadRows()))  # type: ignore[arg-type]
    finally:
        json_arrays.BLOCK_BYTES = small
    assert texts(pieces) == rows
    assert sum(piece.source_bytes for piece in pieces) <= len(data)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=8), separator=st.sampled_from([",", "\t", ";"]))
def test_what_a_csv_writer_writes_comes_back(rows: list[tuple[str, str]], separator: str) -> None:
    stream, notes = io.StringIO(newline=""), []
    # a carriage return alone ends a line for csv, and none for a file
    rows = [tuple(field.replace("\r", "") for field in row) for row in rows]  # type: ignore[misc]
    csv.writer(stream, delimiter=separator, quoting=csv.QUOTE_ALL).writerows([("note", "text"), *rows])
    pieces = read_csv(
        io.BufferedReader(io.BytesIO(stream.getvalue().encode())),  # type: ignore[arg-type]
        Path("x.csv"),
        "text",
        BadRows(),
        kind="tsv" if separator == "\t" else "csv",
        say=notes.append,
    )
    assert texts(list(pieces)) == [text for _, text in rows]
    assert len(notes) == (separator == ";")


def test_semicolons_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id;text\n1;one\n")
    opened = open_text(resolve_source(str(tmp_path / "a.csv"), column="text", split="train"))
    assert texts(list(opened.pieces)) == ["one"]
    assert opened.notes == ["a.csv is read with semicolons between its columns: so its header has 'text'"]


def test_a_row_begins_on_the_line_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\n"one\ntwo"\n\nthree\n')
    opened = open_text(resolve_source(str(tmp_path / "a.csv"), column="text", split="train"))
    assert [(piece.text, piece.row) for piece in opened.pieces] == [("one\ntwo", 2), ("three", 5)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "tsv", "parquet"])
def test_every_kind_compressed_is_what_it_is_uncompressed(tmp_path: Path, kind: str, suffix: str) -> None:
    plain = tmp_path / f"a.{kind}"
    rows = [f"row {index} of some" for index in range(3000)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), plain)
    elif kind == "jsonl":
        plain.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    else:
        plain.write_text(json.dumps(rows) if kind == "json" else "\n".join(["text", *rows]))
    packed = tmp_path / f"a.{kind}{suffix}"
    data = plain.read_bytes()
    packed.write_bytes(gzip.compress(data) if suffix == ".gz" else pyarrow.Codec("zstd").compress(data, asbytes=True))
    opened = open_text(resolve_source(str(packed), column="text", split="train"))
    pieces = list(opened.pieces)
    assert texts(pieces) == read(plain) and len(texts(pieces)) in (1, 3000)
    read_bytes = sum(piece.source_bytes for piece in pieces)
    assert opened.bytes_total == packed.stat().st_size and 0 < read_bytes <= opened.bytes_total


def test_a_folder_is_all_data_below_it(tmp_path: Path) -> None:
    for name in ("b/one.jsonl", "a/two.jsonl", ".cache/hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "a" / "three.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a/three.jsonl.gz"}\n'))
    assert read(tmp_path) == ["a/three.jsonl.gz", "a/two.jsonl", "b/one.jsonl"]
    folder = resolve_source(f"{tmp_path}/", column="text", split="train")
    named = resolve_source(f"{tmp_path}/**/*.jsonl*", column="text", split="train")
    assert identity_of(folder) == identity_of(named)


def test_a_folder_of_several_kinds_or_none(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text\nfrom csv\n")
    (tmp_path / "y.jsonl").write_text('{"text": "y"}\n')
    (tmp_path / "z.jsonl").write_text('{"text": "z"}\n')
    error = problem(tmp_path)
    assert error.what == "the files are of different kinds" and "1 .csv, 2 .jsonl" in str(error.why)
    cure = str(error.do).partition("such as ")[2].partition(",")[0]
    assert read(cure) == ["y", "z"]  # following it works
    (tmp_path / "empty").mkdir()
    assert "the folder holds no data" in problem(tmp_path / "empty").what
    (tmp_path / "empty" / "notes.md").write_text("x")
    assert "below it are only .md" in str(problem(tmp_path / "empty").why)
    (tmp_path / "empty" / "a.jsonl.xz").write_text("x")
    assert "unxz a.jsonl.xz" in str(problem(tmp_path / "empty").do)


def test_identity_knows_kind_and_column(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv", "a.json", "a.txt"):
        (tmp_path / name).write_text('["text"]')
    found = {
        identity_of(resolve_source(str(tmp_path / name), column=column, split="train"))
        for name in ("a.csv", "a.tsv", "a.json", "a.txt")
        for column in ("text", "body")
    }
    assert len(found) == 7  # plain text has no columns


def test_a_quote_that_is_never_closed_is_found_long_before_memory_ends(tmp_path: Path) -> None:
    filler = b"many words\n" * (10 << 20)
    (tmp_path / "a.csv").write_bytes(b'text\n"' + filler)
    (tmp_path / "a.json").write_bytes(b'["' + filler.replace(b"\n", b" "))
    for name, reader in (("a.csv", read_csv), ("a.json", read_json)):
        path = tmp_path / name
        options = {"kind": "csv", "say": lambda text: None} if reader is read_csv else {}
        with path.open("rb") as stream:
            with pytest.raises(InputError):
                list(reader(stream, path, "text", BadRows(), **options))  # type: ignore[operator]
            assert stream.tell() <= 1 << 26
