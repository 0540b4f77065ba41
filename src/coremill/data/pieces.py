"""A piece: a stretch of one document, with where it came from.

Documents are handed on in pieces of at most `PIECE_BYTES`, so that a 10 GB text file needs no 10 GB of memory and its
tokenising can use all cores. A long document is cut where a tokenizer would cut anyway: between two lines that both
have text at the line break; at any line break where there is no such place; inside a line only where there is none at
all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import AnyStr

from coremill.data.conversations import Conversation
from coremill.data.examples import Example

# 128 KiB: a tokenising batch has sixteen for the cores to share, and nearly all real documents stay whole.
PIECE_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a document; rows and lines count from 1."""

    text: str
    file: str
    row: int
    ends_document: bool
    source_bytes: int  # how much of the source it accounts for, for progress
    conversation: Conversation | None = None  # where a row holds one: then there is no text
    example: Example | None = None  # likewise

    @property
    def where(self) -> str:
        return f"{self.file}:{self.row}"


def cut_position(data: AnyStr) -> int:
    """Where to cut `data`, which goes on after its end, so that tokens change least."""
    newline: AnyStr = b"\n" if isinstance(data, bytes) else "\n"
    last_line_break = -1
    # The last quarter only: pieces stay of a size, and the search stays short on text without line breaks.
    position = data.rfind(newline, len(data) * 3 // 4, len(data) - 1)
    while position > 0:
        last_line_break = max(last_line_break, position)
        if not data[position - 1 : position].isspace() and not data[position + 1 : position + 2].isspace():
            return position + 1
        position = data.rfind(newline, len(data) * 3 // 4, position)
    if last_line_break > 0:
        return last_line_break + 1
    end = len(data)
    if isinstance(data, bytes):
        # Inside a UTF-8 character, of at most 4 bytes: what has more is no UTF-8, and a piece of it stays long.
        first = next((end - back for back in (1, 2, 3, 4) if back <= end and data[end - back] & 0xC0 != 0x80), end)
        end = first if first < end and data[first] >= 0xC0 else end
    return max(end, 1)


def pieces_of_text(text: str, *, file: str, row: int, source_bytes: int) -> Iterator[Piece]:
    """One document that is already in memory."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        stretch = text[start : start + PIECE_BYTES]  # never the whole rest: that would copy the text once a piece
        cut = cut_position(stretch)
        yield Piece(stretch[:cut], file, row, False, 0)
        start += cut
    yield Piece(text[start:], file, row, True, source_bytes)
