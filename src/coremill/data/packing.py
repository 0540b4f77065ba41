"""Documents to packed rows: tokenised in batches, each document closed with the end token, cut into full rows.

No token is padding and none is computed twice; the tail that fills no row is not trained on, and counted. In front of
a document and behind it stands what the tokenizer itself puts around a text (data.special_tokens: auto), once: a text
that spells a special token is read as that token, as everywhere in Hugging Face, and gets no second one. Where the
begin token is the end token, one stands between two documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from coremill.data.bad_rows import BadRows
from coremill.data.packed import BOUNDARIES_FILE, DOCUMENTS_FILE, TOKENS_FILE, Progress, require_id_in_vocabulary
from coremill.data.pieces import Piece
from coremill.data.sources import OpenedText
from coremill.data.tokenizer_files import SpecialIds, TextTokenizer
from coremill.errors import InputError
from coremill.files import sync_file

# The tokenizers library holds about 150 bytes per token while a batch is encoded: 2 MiB of text is some 80 MB.
BATCH_CHARACTERS = 1 << 21
BATCH_PIECES = 8192
BOUNDARY_BLOCK_TOKENS = 1 << 22


def pack_text(
    text: OpenedText,
    tokenizer: TextTokenizer,
    *,
    destination: Path,
    sequence_length: int,
    vocabulary_rows: int,
    where: str,
    on_progress: Callable[[Progress], None],
) -> dict[str, Any]:
    """Write the files of a packing into `destination`; the counts for the manifest."""
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.highest_id < 1 << 16 else "uint32"
    with (destination / TOKENS_FILE).open("wb") as stream, (destination / DOCUMENTS_FILE).open("wb") as document_ends:
        writer = _Writer(stream, document_ends, tokenizer, dtype, vocabulary_rows)
        for batch in _batches(text.pieces):
            writer.add(batch)
            on_progress(Progress(writer.documents, writer.source_bytes, text.bytes_total, writer.tokens, "tokenise"))
        if writer.documents == 0:
            raise InputError(
                "the dataset is empty",
                where=where,
                why=why_empty(writer.empty_documents, text.bad),
                do="name files with text in them; for all but txt check data.column",
            )
        rows = writer.tokens // sequence_length
        if rows == 0:
            raise InputError(
                f"the text fills no row: {writer.tokens} tokens, and a row has {sequence_length}",
                where=where,
                why="training takes whole rows",
                do=f"add text, or set data.sequence_length to {writer.tokens} or less",
            )
        for file in (stream, document_ends):
            sync_file(file)
    write_boundaries(destination, dtype, rows, sequence_length, None if writer.end_begins_next else tokenizer.eos_id)
    text.bad.write(destination)
    return {
        "eos_id": tokenizer.eos_id,
        "dtype": dtype,
        "rows": rows,
        "tokens": rows * sequence_length,
        "dropped_tokens": writer.tokens - rows * sequence_length,
        "documents": writer.documents,
        "empty_documents": writer.empty_documents,
        "bad_rows": text.bad.count,
        "bad_rows_words": text.bad.words() if text.bad.count else "",
        "highest_id": writer.highest_id,
        "highest_token": tokenizer.token_of(writer.highest_id),
        "begin_ids": list(writer.begin),
        "is_plain": writer.is_plain,
        "notes": text.notes,
    }


def why_empty(empty_documents: int, bad: BadRows) -> str:
    """Why there is no document."""
    if bad.count:
        return f"{bad.words()}; the first: {bad.listed[0]['where']}"
    return f"its {empty_documents} documents hold no text" if empty_documents else "it holds no documents"


def count_tokens(pieces: Iterator[Piece], tokenizer: TextTokenizer, vocabulary_rows: int) -> dict[str, int]:
    """What documents would become, and how much of the source they are; nothing is kept."""
    with Path(os.devnull).open("wb") as nowhere:
        writer = _Writer(nowhere, nowhere, tokenizer, "uint32", vocabulary_rows)
        for batch in _batches(pieces):
            writer.add(batch)
    return {"tokens": writer.tokens, "source_bytes": writer.source_bytes}


class _Writer:
    """Appends documents to tokens.bin, where each ends to documents.bin, and counts."""

    def __init__(
        self, stream: IO[bytes], document_ends: IO[bytes], tokenizer: TextTokenizer, dtype: str, vocabulary_rows: int
    ) -> None:
        self._stream, self._document_ends = stream, document_ends
        self._tokenizer = tokenizer
        self._dtype = np.dtype(dtype)
        self._vocabulary_rows = vocabulary_rows
        around, eos_id = tokenizer.around or SpecialIds(), tokenizer.eos_id
        self._never_twice = tokenizer.around is not None
        self.begin = around.begin
        self._end = around.end if around.end[-1:] == (eos_id,) else (*around.end, eos_id)
        self.end_begins_next = self.begin[:1] == (eos_id,)
        self.is_plain = not self.begin and self._end == (eos_id,)
        self._open: tuple[int, ...] | None = None  # the last ids of the document that is not closed yet
        self.documents = 0
        self.empty_documents = 0
        self.tokens = 0
        self.source_bytes = 0
        self.highest_id = 0
        for ids, place in ((self._end, "its end token"), (self.begin, "its begin token")):
            if ids:
                self._check(np.array(ids, dtype=np.uint32), place)

    def add(self, batch: list[Piece]) -> None:
        encoded = self._tokenizer.encode([piece.text for piece in batch])
        parts: list[npt.NDArray[np.uint32]] = []
        ends: list[int] = []
        begin, end = (np.array(ids, dtype=np.uint32) for ids in (self.begin, self._end))

        def append(part: npt.NDArray[np.uint32]) -> None:
            parts.append(part)
            self.tokens += len(part)

        for piece, encoded_ids in zip(batch, encoded, strict=True):
            ids = encoded_ids
            self.source_bytes += piece.source_bytes
            if self._open is None and self.end_begins_next and self.documents and tuple(ids[:1]) == self.begin[:1]:
                ids = ids[1:]  # it stands there already
            blank = self._open is None and not piece.text.strip()
            if ids and not blank:
                part = np.asarray(ids, dtype=np.uint32)
                self._check(part, piece.where)
                needed = begin[1:] if self.end_begins_next and self.documents else begin
                if self._open is None and tuple(ids[: len(needed)]) != tuple(needed):
                    append(needed)
                append(part)
                self._open = (*(self._open or ()), *ids[-len(end) :])[-len(end) :]
            if not piece.ends_document:
                continue
            if self._open is None:
                self.empty_documents += 1
                continue
            if self._never_twice and self._open == self._end:
                self.is_plain = False
            else:
                append(end)
            self.documents += 1
            ends.append(self.tokens)
            self._open = None
        if parts:
            self._stream.write(np.concatenate(parts).astype(self._dtype, copy=False).tobytes())
        if ends:
            self._document_ends.write(np.array(ends, dtype=np.uint64).tobytes())

    def _check(self, part: npt.NDArray[np.uint32], place: str) -> None:
        highest = int(part.max())
        if highest > self.highest_id:
            self.highest_id = highest
            token = self._tokenizer.token_of(highest)
            require_id_in_vocabulary(highest, token, self._vocabulary_rows, self._tokenizer.name, place)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def write_boundaries(destination: Path, dtype: str, rows: int, sequence_length: int, eos_id: int | None) -> None:
    """Per row the number of end tokens that are followed by another token of the row: each takes away one target.

    None: an end token begins the next document too, and takes none away.
    """
    tokens = np.memmap(destination / TOKENS_FILE, dtype=dtype, mode="r", shape=(rows, sequence_length))
    block_rows = max(1, BOUNDARY_BLOCK_TOKENS // sequence_length)
    with (destination / BOUNDARIES_FILE).open("wb") as stream:
        for first in range(0, rows, block_rows):
            block = tokens[first : first + block_rows, :-1]
            lost = np.zeros(len(block)) if eos_id is None else np.count_nonzero(block == eos_id, axis=1)
            stream.write(lost.astype(np.uint32).tobytes())
        sync_file(stream)
