from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.data import pieces as pieces_module
from coremill.data.pieces import cut_position
from coremill.data.sources import TextSource, identity_of, open_text, resolve_source
from coremill.errors import InputError


def resolve(source: object, column: str = "text") -> TextSource:
    return resolve_source(str(source), column=column, split="train")


def documents(source: object, column: str = "text") -> list[str]:
    """What is read, pieces joined, after a trip through JSON as to the tokenising process."""
    found = TextSource.from_json(json.loads(json.dumps(resolve(source, column).to_json())))
    whole, open_document = [], ""
    for piece in open_text(found).pieces:
        open_document += piece.text
        if piece.ends_document:
            whole.append(open_document)
            open_document = ""
    assert not open_document
    return whole


def problem(source: object, column: str = "text") -> InputError:
    with pytest.raises(InputError) as caught:
        documents(source, column)
    assert caught.value.exit_code == 78
    return caught.value


def write_parquet(path: Path, **columns: list[object]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_txt_is_one_document_a_file_in_order_of_name(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n\nstill second")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst")
    assert documents(tmp_path / "*.txt") == ["first", "second\n\nstill second"]


def test_globs_reach_into_folders_and_jsonl_skips_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "x.jsonl").write_text('{"body": "one"}\n\n{"body": "two", "n": 1}')
    assert documents(tmp_path / "**" / "*.jsonl", column="body") == ["one", "two"]


def test_parquet_reads_one_column_over_row_groups(tmp_path: Path) -> None:
    texts = [f"row {index}" for index in range(2500)]
    table = pyarrow.table({"n": list(range(2500)), "text": pyarrow.array(texts).dictionary_encode()})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=700)
    assert documents(tmp_path / "x.parquet") == texts
    opened = open_text(resolve(tmp_path / "x.parquet"))
    assert sum(piece.source_bytes for piece in opened.pieces) == pytest.approx(opened.bytes_total, abs=2)


def test_long_documents_come_in_pieces_and_stay_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coremill.data.files.PIECE_BYTES", 64)
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 64)
    long = "".join(f"line {index} ünïcödé\n" for index in range(40)) + "🙂" * 70
    (tmp_path / "x.txt").write_text(long)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": long}) + "\n" + json.dumps({"text": "short"}))
    assert documents(tmp_path / "x.txt") == [long]
    assert documents(tmp_path / "x.jsonl") == [long, "short"]
    assert sum(1 for _ in open_text(resolve(tmp_path / "x.txt")).pieces) > 10


def test_a_cut_prefers_the_break_between_two_lines_of_text() -> None:
    text = "x" * 90 + "\nabc\n\n  def"
    assert text[: cut_position(text)].endswith("x\n")
    assert cut_position(text.encode()) == cut_position(text)
    assert cut_position("no line break at all") == 20


@settings(deadline=None)
@given(st.text(min_size=1, max_size=80))
def test_a_cut_moves_on_and_never_splits_a_character(text: str) -> None:
    data = (text * 3).encode("utf-8", "ignore") or b"x"
    cut = cut_position(data)
    assert 1 <= cut <= len(data)
    if data[cut:] or data[:cut].isascii():
        data[:cut].decode("utf-8")


def test_identity_follows_content_not_place(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("same text")
    first = identity_of(resolve(tmp_path / "one" / "*.txt"))
    assert identity_of(resolve(tmp_path / "two" / "a.txt")) == first
    assert identity_of(resolve(tmp_path / "two" / "a.txt", column="other")) == first  # text has no columns
    (tmp_path / "two" / "a.txt").write_text("same texT")
    assert identity_of(resolve(tmp_path / "two" / "a.txt")) != first
    (tmp_path / "two" / "a.txt").write_text("same ")
    (tmp_path / "two" / "b.txt").write_text("text")
    assert identity_of(resolve(tmp_path / "two" / "*.txt")) != first


def test_built_in_corpus_is_the_standard_library() -> None:
    source = resolve("built-in")
    assert sum(Path(file).stat().st_size for file in source.files) > 8_000_000
    assert not any("site-packages" in file or "/test/" in file for file in source.files)
    assert any(file.endswith("argparse.py") for file in source.files)
    assert list(source.files) == sorted(source.files)
    assert next(open_text(source).pieces).text


def test_no_match_lists_what_is_nearby(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "folder").mkdir()
    message = str(problem(tmp_path / "missing" / "*.txt"))
    assert "no file matches" in message and "folder/, notes.md" in message and "data.source" in message
    assert "there is no such file" in str(problem(tmp_path / "x.txt"))
    assert "is empty" in str(problem(tmp_path / "folder" / "*.txt"))


def test_mixed_and_unknown_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.jsonl").write_text("{}")
    message = str(problem(tmp_path / "*"))
    assert "different kinds" in message and "1 .jsonl, 1 .txt" in message
    (tmp_path / "c.pdf").write_text("x")
    assert "c.pdf is not a kind of file coremill reads" in str(problem(tmp_path / "*"))
    assert "'s3://' is not a source" in str(problem("s3://bucket/x.txt"))


def test_missing_column_lists_the_columns(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"texts": "b", "id": 1}\n')
    message = str(problem(tmp_path / "x.jsonl"))
    assert "no column 'text'; did you mean 'texts'?" in message and "x.jsonl:2" in message and "texts, id" in message
    write_parquet(tmp_path / "x.parquet", content=["a"], id=[1])
    message = str(problem(tmp_path / "x.parquet"))
    assert "no column 'text'" in message and "content, id" in message and "data.column" in message


@pytest.mark.parametrize(
    ("value", "what"), [("null", "null"), ("7", "a number"), ('["a"]', "a list"), ('{"a": 1}', "an object")]
)
def test_text_that_is_not_text(tmp_path: Path, value: str, what: str) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"text": "fine"}}\n{{"text": {value}}}\n')
    message = str(problem(tmp_path / "x.jsonl"))
    assert f"column 'text' holds {what}, not text" in message and "x.jsonl:2" in message


def test_parquet_nulls_and_types(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", text=["a", None])
    assert "x.parquet:2" in str(problem(tmp_path / "x.parquet"))
    write_parquet(tmp_path / "y.parquet", text=[1, 2], body=["a", "b"])
    message = str(problem(tmp_path / "y.parquet"))
    assert "column 'text' holds int64, not text" in message and "columns of text are: body" in message


def test_half_a_character(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "\\ud800"}\n')
    assert "half a character" in str(problem(tmp_path / "x.jsonl"))


def test_invalid_utf8_names_line_and_byte(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"fine\nalso fine\ncaf\xe9 au lait\n")
    message = str(problem(tmp_path / "x.txt"))
    assert "not UTF-8" in message and "x.txt:3" in message and "byte 18" in message and "iconv" in message
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "x.jsonl:2" in str(problem(tmp_path / "x.jsonl"))
    binary = pyarrow.array([b"fine", b"\xff\xfe"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, binary.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    message = str(problem(tmp_path / "x.parquet"))
    assert "not UTF-8" in message and "x.parquet:2" in message


def test_invalid_json_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "b"')
    message = str(problem(tmp_path / "x.jsonl"))
    assert "not a line of JSON" in message and "x.jsonl:2" in message and "may be cut off" in message
    (tmp_path / "x.jsonl").write_text('["a"]\n')
    assert "the line holds a list, not an object" in str(problem(tmp_path / "x.jsonl"))


def test_truncated_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", text=[f"text {index}" for index in range(1000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    message = str(problem(path))
    assert "not a whole parquet file" in message and "x.parquet" in message and "again" in message
    path.write_bytes(whole[:200] + bytes(len(whole) - 700) + whole[-500:])  # a whole footer, damaged pages
    assert "not a whole parquet file" in str(problem(path))


def test_a_home_that_is_not_known_here_is_a_path_that_is_not_there() -> None:
    for name in ("~nobody-of-that-name/notes.txt", "~notes.txt"):
        with pytest.raises(InputError, match="notes"):
            resolve_source(name, column="text", split="train")
