"""A document in pieces: the same cuts as the plain way makes, in time that grows with the length and no faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.data import files, pieces
from coremill.data.bad_rows import BadRows
from coremill.data.files import read_txt
from coremill.data.pieces import cut_position, pieces_of_text


def cuts_of_0_1_0(text: str, size: int) -> Iterator[str]:
    """What 0.1.0 did: it copied the rest of the text once for every piece."""
    while len(text) > size:
        cut = cut_position(text[:size])
        yield text[:cut]
        text = text[cut:]
    yield text


TEXTS = st.lists(st.sampled_from(["word", " ", "\n", "\n\n", "é", "文字", "🙂", "\r\n", "\t", "x" * 40]), max_size=200)


@settings(max_examples=200, deadline=None)
@given(parts=TEXTS, size=st.integers(8, 64))
def test_the_same_pieces_as_ever(parts: list[str], size: int) -> None:
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", size)
        found = list(pieces_of_text(text, file="x.jsonl", row=1, source_bytes=7))
    assert [piece.text for piece in found] == list(cuts_of_0_1_0(text, size))
    assert [piece.ends_document for piece in found] == [False] * (len(found) - 1) + [True]
    assert sum(piece.source_bytes for piece in found) == 7


class Counted(str):
    """Text that knows how much of it was copied out."""

    copied = 0

    def __getitem__(self, key: Any) -> str:
        part = super().__getitem__(key)
        Counted.copied += len(part)
        return Counted(part)


def test_a_long_document_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 10)
    text = Counted("a line of some length\n" * 50_000)  # 1,100 pieces: 0.1.0 copied it 540 times
    assert "".join(piece.text for piece in pieces_of_text(text, file="x", row=1, source_bytes=1)) == str(text)
    assert Counted.copied < 3 * len(text)


def test_what_is_no_utf8_stays_in_long_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuation bytes only: 0.1.0 went back to the first and took one byte a piece."""
    monkeypatch.setattr(files, "PIECE_BYTES", 1 << 10)
    path = tmp_path / "binary.txt"
    path.write_bytes(b"\x80" * (1 << 16))
    bad = BadRows("skip")
    with path.open("rb") as stream:
        assert len(list(read_txt(stream, path, bad))) == 64 and bad.count == 64
