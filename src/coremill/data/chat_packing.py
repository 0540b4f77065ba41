"""Conversations to packed rows: written by the chat template, tokenised whole, whole ones put together in rows.

Every text is tokenised once, as it stands: pieces tokenised apart would give other tokens at their seams. Which tokens
are learned follows from where they stand in the text (chat_template.py says which stretches). A conversation longer
than a row is cut at its end; one of which no learned token is left is left out. Both are counted.

Beside tokens.bin such a packing has marks.bin, a byte per token (packed.py). No row is without a learned token.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from coremill.data.best_fit import rows_of
from coremill.data.chat_template import ChatTemplate, Learn, Span, Written, special_tokens_of
from coremill.data.packed import (
    DOCUMENTS_FILE,
    LEARNED,
    MARKS_FILE,
    ROWS_FILE,
    STARTS,
    TOKENS_FILE,
    ConversationCounts,
    Progress,
    require_id_in_vocabulary,
)
from coremill.data.packing import BATCH_CHARACTERS, BATCH_PIECES, why_empty
from coremill.data.pieces import Piece
from coremill.data.sources import OpenedText
from coremill.data.tokenizer_files import TextTokenizer
from coremill.errors import InputError
from coremill.files import sync_file

CUT_SHARE = 0.05  # of conversations that lose part of an answer: beyond it, it is said what to do
KEPT_SHARE = 0.95  # of conversations that the advised length keeps whole
ROWS_AT_ONCE = 256
UNPACKED = "unpacked"  # suffix of the files that hold conversations one after the other, until rows are made of them


@dataclass(frozen=True)
class ChatJob:
    """How conversations become tokens."""

    template: str
    learn: Learn
    sequence_length: int
    vocabulary_rows: int
    class_tokens: Mapping[str, str] = field(default_factory=dict)  # special tokens that no file of the tokenizer names


class ChatTokenizer:
    """Conversations to token ids, and which of these are learned."""

    def __init__(self, tokenizer: TextTokenizer, folder: Path, job: ChatJob) -> None:
        if tokenizer.backend is None:
            raise InputError(
                "this tokenizer does not say where in a text its tokens stand",
                where=f"tokenizer: {folder}",
                why="it is one of transformers' slow ones; which tokens belong to an answer could not be told",
                do="name a tokenizer that has a tokenizer.json",
            )
        self._tokenizer, self._backend, self._job = tokenizer, tokenizer.backend, job
        added = {
            int(token_id): str(token.content) for token_id, token in self._backend.get_added_tokens_decoder().items()
        }
        self._added = np.array(sorted(added), dtype=np.int64)
        singles = [*added.values(), tokenizer.token_of(tokenizer.eos_id)]
        self._template = ChatTemplate(job.template, {**job.class_tokens, **special_tokens_of(folder)}, singles)
        self.highest_id = 0
        self._enders = frozenset((*added, tokenizer.eos_id))
        self.end_ids: set[int] = set()  # tokens that answers ended with
        self.end_marks: Counter[str] = Counter()  # ends that are no single token

    def written(self, piece: Piece) -> Written:
        assert piece.conversation is not None
        return self._template.written(piece.conversation, self._job.learn, piece.where)

    def tokens(self, written: Sequence[Written], pieces: Sequence[Piece]) -> Iterator[tuple[Any, Any]]:
        """Ids and whether each is learned, of each conversation, whole."""
        encodings = self._backend.encode_batch([each.text for each in written], add_special_tokens=False)
        for each, piece, encoding in zip(written, pieces, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.uint32)
            self._require_known(ids, piece)
            learned = learned_tokens(encoding.offsets, each.learned, is_added=np.isin(ids, self._added))
            learned[:1] = False  # nothing of the conversation comes before its first token
            if (end := self._end_of_answer(ids, encoding.offsets, learned, each, piece)) is not None:
                self.end_ids.add(end)
            if each.end_mark is not None:
                self.end_marks[each.end_mark] += 1
            yield ids, learned

    def _end_of_answer(
        self,
        ids: npt.NDArray[np.uint32],
        offsets: Sequence[tuple[int, int]],
        learned: npt.NDArray[np.bool_],
        written: Written,
        piece: Piece,
    ) -> int | None:
        """The token that ends the last answer, behind which a template may write a line end; None: it has none."""
        assert piece.conversation is not None
        if self._job.learn == "all" and not piece.conversation.ends_with_answer:
            return None
        words = (place for place in np.flatnonzero(learned)[::-1].tolist() if not _is_blank(written, offsets[place]))
        last = next(words, None)
        return int(ids[last]) if last is not None and int(ids[last]) in self._enders else None

    def _require_known(self, ids: npt.NDArray[np.uint32], piece: Piece) -> None:
        highest = int(ids.max(initial=0))
        if highest > self.highest_id:
            self.highest_id = highest
            token = self._tokenizer.token_of(highest)
            require_id_in_vocabulary(highest, token, self._job.vocabulary_rows, self._tokenizer.name, piece.where)


def _is_blank(written: Written, place: tuple[int, int]) -> bool:
    return not written.text[slice(*place)].strip()


def learned_tokens(
    offsets: Sequence[tuple[int, int]], spans: Sequence[Span], *, is_added: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Which tokens stand in one of the spans of characters.

    A token over the beginning of a span, a blank of the header joined to the first word, is learned; not so one of the
    template's own that takes the blanks behind it along.
    """
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = places[:, 0], places[:, 1]
    learned = np.zeros(len(places), dtype=bool)
    for first, last in spans:
        inside = (ends > first) & (starts < last)
        learned |= inside & ((starts >= first) | ~is_added)
    return learned


def pack_conversations(
    text: OpenedText,
    tokenizer: TextTokenizer,
    folder: Path,
    job: ChatJob,
    *,
    destination: Path,
    where: str,
    on_progress: Callable[[Progress], None],
) -> dict[str, Any]:
    """Write the files of a packing into `destination`; the counts for the manifest. `folder` is the tokenizer's."""
    chat = ChatTokenizer(tokenizer, folder, job)
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.highest_id < 1 << 16 else "uint32"
    paths = [destination / f"{name}.{UNPACKED}" for name in (TOKENS_FILE, MARKS_FILE)]
    with paths[0].open("wb") as tokens, paths[1].open("wb") as marks:
        writer = _Writer(tokens, marks, np.dtype(dtype), job.sequence_length)
        source_bytes = 0
        for pieces, written in _batches(text, chat):
            for ids, learned in chat.tokens(written, pieces):
                writer.add(ids, learned)
            source_bytes += sum(piece.source_bytes for piece in pieces)
            done = Progress(writer.count, source_bytes, text.bytes_total, writer.tokens, "tokenise")
            on_progress(replace(done, counted="conversations"))
    if not writer.lengths:
        raise _nothing_to_learn(writer, text, job, where)
    unpacked = Unpacked(
        np.memmap(paths[0], dtype, mode="r", shape=(writer.tokens,)),
        np.memmap(paths[1], np.uint8, mode="r", shape=(writer.tokens,)),
        np.array(writer.lengths, dtype=np.int64),
    )
    counts = write_rows(destination, unpacked, job.sequence_length, tokenizer.eos_id)
    del unpacked
    for path in paths:
        path.unlink()
    text.bad.write(destination)
    conversations = ConversationCounts(
        **counts.pop("conversations"), cut=writer.cut, cut_learned=writer.cut_learned, left_out=writer.left_out,
        learn=job.learn, end_ids=tuple(sorted(chat.end_ids)),
    )  # fmt: skip
    return {
        **counts,
        "eos_id": tokenizer.eos_id,
        "dtype": dtype,
        "empty_documents": 0,
        "bad_rows": text.bad.count,
        "bad_rows_words": text.bad.words() if text.bad.count else "",
        "highest_id": chat.highest_id,
        "highest_token": tokenizer.token_of(chat.highest_id),
        "notes": [*text.notes, *_notes(writer, chat, job)],
        "conversations": asdict(conversations),
    }


def count_chat_tokens(pieces: Iterator[Piece], tokenizer: TextTokenizer, folder: Path, job: ChatJob) -> dict[str, int]:
    """How many tokens the rows of these conversations have, padding included, and how much of the source they are;
    nothing is kept."""
    chat, source_bytes = ChatTokenizer(tokenizer, folder, job), 0
    lengths: list[int] = []
    for batch, written in _batches(OpenedText(pieces, None), chat):
        lengths += [min(len(ids), job.sequence_length) for ids, _ in chat.tokens(written, batch)]
        source_bytes += sum(piece.source_bytes for piece in batch)
    rows = len(rows_of(lengths, job.sequence_length))
    return {"tokens": rows * job.sequence_length, "source_bytes": source_bytes}


@dataclass(frozen=True)
class Unpacked:
    """Conversations one after the other."""

    tokens: npt.NDArray[Any]
    marks: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64] | None = None  # where they stand; None: without a gap

    def chosen(self, which: npt.NDArray[np.bool_]) -> Unpacked:
        """Some of them."""
        return Unpacked(self.tokens, self.marks, self.lengths[which], self._starts()[which])

    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths if self.starts is None else self.starts

    def each(self) -> list[slice]:
        starts, ends = self._starts().tolist(), (self._starts() + self.lengths).tolist()
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


def write_rows(destination: Path, unpacked: Unpacked, sequence_length: int, filler_id: int) -> dict[str, Any]:
    """Conversations put together in rows, the rest of a row filled up; counts for the manifest."""
    rows, places = rows_of(unpacked.lengths.tolist(), sequence_length), unpacked.each()
    documents = np.zeros((len(places), 2), dtype=np.uint64)
    learned_total = 0
    with (
        (destination / TOKENS_FILE).open("wb") as tokens_file,
        (destination / MARKS_FILE).open("wb") as marks_file,
        (destination / ROWS_FILE).open("wb") as rows_file,
        (destination / DOCUMENTS_FILE).open("wb") as documents_file,
    ):
        for first in range(0, len(rows), ROWS_AT_ONCE):
            block = rows[first : first + ROWS_AT_ONCE]
            tokens = np.full((len(block), sequence_length), filler_id, dtype=unpacked.tokens.dtype)
            marks = np.zeros(tokens.shape, dtype=np.uint8)
            real = np.zeros(len(block), dtype=np.uint32)
            for index, numbers in enumerate(block):
                at = 0
                for number in numbers:
                    place = places[number]
                    length = place.stop - place.start
                    tokens[index, at : at + length] = unpacked.tokens[place]
                    marks[index, at : at + length] = unpacked.marks[place]
                    documents[number] = (first + index) * sequence_length + at, length
                    at += length
                real[index] = at
                if at < sequence_length:
                    marks[index, at] = STARTS  # what fills a row up belongs to no conversation
            learned = np.count_nonzero(marks & LEARNED, axis=1).astype(np.uint32)
            learned_total += int(learned.sum())
            tokens_file.write(tokens.tobytes())
            marks_file.write(marks.tobytes())
            rows_file.write(np.stack([learned, real], axis=1).tobytes())
        documents_file.write(documents.tobytes())
        for file in (tokens_file, marks_file, rows_file, documents_file):
            sync_file(file)
    return {
        "rows": len(rows),
        "tokens": len(rows) * sequence_length,
        "dropped_tokens": 0,
        "documents": len(places),
        "conversations": {"real_tokens": int(unpacked.lengths.sum()), "learned_tokens": learned_total},
    }


class _Writer:
    """Appends conversations to the files of unpacked ones, cut to the length of a row, and counts."""

    def __init__(self, tokens: IO[bytes], marks: IO[bytes], dtype: np.dtype[Any], longest: int) -> None:
        self._tokens, self._marks, self._dtype, self._longest = tokens, marks, dtype, longest
        self.lengths: list[int] = []
        self.whole_lengths: Counter[int] = Counter()  # before they were cut
        self.tokens = self.count = 0
        self.learned = self.cut_learned = 0  # tokens: all, and those cut off
        self.cut = self.left_out = 0  # conversations that lost learned tokens, and those that lost all

    def add(self, ids: npt.NDArray[np.uint32], learned: npt.NDArray[np.bool_]) -> None:
        self.count += 1
        self.whole_lengths[len(ids)] += 1
        self.learned += int(learned.sum())
        kept = learned[: self._longest]
        if (lost := int(learned[self._longest :].sum())) > 0:
            self.cut += 1
            self.cut_learned += lost
        if not kept.any():
            self.left_out += 1
            return
        marks = kept.astype(np.uint8) * LEARNED
        marks[0] |= STARTS
        self._tokens.write(ids[: self._longest].astype(self._dtype).tobytes())
        self._marks.write(marks.tobytes())
        self.lengths.append(len(kept))
        self.tokens += len(kept)

    def length_that_keeps(self, share: float) -> int:
        """In tokens: so long are at most so many conversations, rounded up to a handy number."""
        lengths = sorted(self.whole_lengths)
        sums = np.cumsum([self.whole_lengths[length] for length in lengths]).tolist()
        length = lengths[bisect.bisect_left(sums, share * self.count)]
        return -(-length // 256) * 256


def _batches(text: OpenedText, chat: ChatTokenizer) -> Iterator[tuple[list[Piece], list[Written]]]:
    """Conversations written down, as many as are tokenised at once; those that cannot be are bad rows."""
    pieces: list[Piece] = []
    written: list[Written] = []
    characters = 0
    for piece in text.pieces:
        try:
            written.append(chat.written(piece))
        except InputError as problem:
            text.bad.take(problem)
            continue
        pieces.append(piece)
        characters += len(written[-1].text)
        if characters >= BATCH_CHARACTERS or len(pieces) >= BATCH_PIECES:
            yield pieces, written
            pieces, written, characters = [], [], 0
    if pieces:
        yield pieces, written


def _nothing_to_learn(writer: _Writer, text: OpenedText, job: ChatJob, where: str) -> InputError:
    if writer.count == 0:
        do = "name files with conversations in them"
        return InputError("the dataset is empty", where=where, why=why_empty(0, text.bad), do=do)
    return InputError(
        "no answer is left to learn",
        where=where,
        why=f"none of the {writer.count:,} conversations has a token of an answer within a row of"
        f" {job.sequence_length:,} tokens",
        do=f"set data.sequence_length to {writer.length_that_keeps(KEPT_SHARE):,}",
    )


def _notes(writer: _Writer, chat: ChatTokenizer, job: ChatJob) -> list[str]:
    """What people must hear of how their conversations were read."""
    notes = []
    if writer.cut:
        share, lost = writer.cut / writer.count, writer.cut_learned / max(1, writer.learned)
        have = "has" if writer.cut == 1 else "have"
        words = (
            f"{writer.cut:,} of {writer.count:,} conversations ({share:.1%}) {have} answers beyond a row of"
            f" {job.sequence_length:,} tokens: {lost:.1%} of the tokens to learn are cut off"
        )
        are = "is" if writer.left_out == 1 else "are"
        words += f", and {writer.left_out:,} {are} left out, with no answer in the row" if writer.left_out else ""
        if share > CUT_SHARE:
            longer = writer.length_that_keeps(KEPT_SHARE)
            words = f"warning: {words}; data.sequence_length {longer:,} keeps {KEPT_SHARE:.0%} of them whole"
        notes.append(words)
    for mark, count in chat.end_marks.most_common(1):
        said = f"ends {count:,} conversations with {mark!r}, which is no token of its own here" if mark else (
            f"writes no end token behind answers of {count:,} conversations"
        )  # fmt: skip
        notes.append(
            f"warning: the chat template {said}: the model does not learn to stop where chats stop; a template that"
            " writes {{ eos_token }} or another special token behind an answer teaches it (data.chat_template)"
        )
    return notes
