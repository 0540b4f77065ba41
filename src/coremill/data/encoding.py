"""Examples to rows on disk, in the process that tokenises: encoded in batches by the tokenizer's own rule for one text
or two, cut to the length of a row; questions become windows over their context (windows.py).

Rows are as long as they are: they are filled up where a batch is made, to the longest of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from coremill.data.compressed import is_compressed
from coremill.data.encoded import (
    EXAMPLE_PLACES_FILE,
    EXAMPLES_FILE,
    GROUPS_FILE,
    LENGTHS_FILE,
    OFFSETS_FILE,
    ROW_EXAMPLES_FILE,
    TOKENS_FILE,
    TYPES_FILE,
    target_file,
)
from coremill.data.examples import LabelledText
from coremill.data.files import parquet_schema
from coremill.data.hub_datasets import schema_of_dataset
from coremill.data.labels import LabelReader, Labels
from coremill.data.packed import Progress, require_id_in_vocabulary
from coremill.data.packing import why_empty
from coremill.data.pair_tokenizer import PairTokenizer, load_pair_tokenizer
from coremill.data.pieces import Piece
from coremill.data.questions import Question
from coremill.data.sources import OpenedText, TextSource, open_text
from coremill.data.windows import Window, Windows
from coremill.errors import InputError
from coremill.files import sync_file

# An encoding of the library has some 300 bytes a token with its offsets, and overlapping windows have more tokens.
BATCH_CHARACTERS = 1 << 20
BATCH_EXAMPLES = 4096
CUT_SHARE = 0.05  # of texts that do not fit a row: beyond it, it is said what to do


@dataclass(frozen=True)
class EncodingJob:
    """How examples become rows."""

    sequence_length: int
    doc_stride: int  # tokens that neighbouring windows of a context share
    vocabulary_rows: int
    labels: Labels | None  # asked for
    labels_setting: str  # where
    may_name: bool  # the labels may name classes of which only the count is known
    destination: Path
    where: str  # the source, for messages


def encode_source(job: Mapping[str, Any], on_progress: Callable[[Progress], None]) -> dict[str, Any]:
    """Do a job that `Encoder.job_of` (encode.py) describes."""
    source = TextSource.from_json(job["source"])
    tokenizer = load_pair_tokenizer(
        Path(job["tokenizer_folder"]), code_sha256=job["code_sha256"], cache=Path(job["cache"])
    )
    destination = Path(job["destination"])
    os.chdir(destination)  # datasets takes a folder of the same name for the dataset; here there is none
    labels = None if job["labels"] is None else Labels.from_json(job["labels"])
    setting, may_name = job["labels_setting"], job["may_name"]
    form = source.examples
    assert form is not None
    if form.kind == "labelled texts" and (labels is None or (not labels.names and labels.kind == "classes")):
        names = class_names_of(source, form.columns[-1])
        if names and (labels is None or (may_name and labels.count == len(names))):
            labels, setting = Labels(kind="classes", count=len(names), names=names), f"the features of {source.name}"
    found = EncodingJob(
        sequence_length=job["sequence_length"],
        doc_stride=job["doc_stride"],
        vocabulary_rows=job["vocabulary_rows"],
        labels=labels,
        labels_setting=setting,
        may_name=may_name,
        destination=destination,
        where=source.where,
    )
    return encode_examples(open_text(source), tokenizer, found, on_progress)


def class_names_of(source: TextSource, column: str) -> tuple[str, ...]:
    """The names of classes that a dataset of the hub, or a parquet file of one, knows its labels by."""
    if source.dataset is not None:
        schema = schema_of_dataset(source.dataset, source.where)
    elif source.kind == "parquet" and not is_compressed(Path(source.files[0])):
        schema = parquet_schema(Path(source.files[0]))
    else:
        return ()
    try:
        described = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        return tuple(map(str, described["names"])) if described["_type"] == "ClassLabel" else ()
    except (KeyError, TypeError, ValueError):
        return ()


def encode_examples(
    text: OpenedText, tokenizer: PairTokenizer, job: EncodingJob, on_progress: Callable[[Progress], None]
) -> dict[str, Any]:
    """Write the files of an encoding; the counts for its manifest."""
    pieces = iter(text.pieces)
    first = next(pieces, None)
    if first is None:
        do = "name files with examples in them"
        raise InputError("the dataset is empty", where=job.where, why=why_empty(0, text.bad), do=do)
    opened = OpenedText(_again(first, pieces), text.bytes_total, text.bad, text.notes)
    with RowWriter(job, tokenizer) as writer:
        if isinstance(first.example, Question):
            found = _encode_questions(opened, tokenizer, job, writer, on_progress)
        else:
            found = _encode_texts(opened, tokenizer, job, writer, on_progress)
        if writer.rows == 0:
            raise InputError(
                "the dataset is empty", where=job.where, why=why_empty(0, text.bad), do="name files with examples"
            )
        counts = writer.close()
    text.bad.write(job.destination)
    return {
        **{"null_position": 0, "cut_rows": 0, "unanswerable": 0, "outside_rows": 0, "labels": None},
        **counts,
        **found,
        "pad_id": tokenizer.pad_id,
        "padding_side": tokenizer.padding_side,
        "bad_rows": text.bad.count,
        "bad_rows_words": text.bad.words() if text.bad.count else "",
        "notes": [*text.notes, *found["notes"]],
        "sizes": {path.name: path.stat().st_size for path in sorted(job.destination.iterdir())},
    }


class RowWriter:
    """Appends rows to the files that are large, keeps what there is of each row, and counts."""

    def __init__(self, job: EncodingJob, tokenizer: PairTokenizer) -> None:
        self._job, self._tokenizer = job, tokenizer
        self.dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.highest_id < 1 << 16 else "uint32"
        self._files: dict[str, IO[bytes]] = {}
        self._has_types = False
        self._lengths: list[int] = []
        self._highest_id = 0
        self.tokens = 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def rows(self) -> int:
        return len(self._lengths)

    def add(
        self, ids: npt.NDArray[np.uint32], types: npt.NDArray[np.uint8], lengths: list[int], places: Sequence[str]
    ) -> None:
        """Rows of a batch, one after the other; `places`: where each comes from."""
        self._require_known(ids, lengths, places)
        self._has_types = self._has_types or bool(types.any())
        self.write(TOKENS_FILE, ids.astype(self.dtype, copy=False))
        self.write(TYPES_FILE, types)
        self._lengths += lengths
        self.tokens += len(ids)

    def write(self, name: str, values: npt.NDArray[Any] | bytes) -> None:
        if name not in self._files:
            self._files[name] = (self._job.destination / name).open("wb")
        self._files[name].write(values if isinstance(values, bytes) else values.tobytes())

    def save(self, name: str, values: npt.NDArray[Any]) -> None:
        """A small one, whole."""
        with (self._job.destination / name).open("wb") as stream:
            np.save(stream, values)
            sync_file(stream)

    def close(self) -> dict[str, Any]:
        lengths = np.array(self._lengths, dtype=np.int32)
        self.save(LENGTHS_FILE, lengths)
        for file in self._files.values():
            sync_file(file)
        if not self._has_types:
            (self._job.destination / TYPES_FILE).unlink()
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "dtype": self.dtype,
            "has_types": self._has_types,
            "longest_row": int(lengths.max()),
            "highest_id": self._highest_id,
            "highest_token": self._tokenizer.token_of(self._highest_id),
        }

    def _require_known(self, ids: npt.NDArray[np.uint32], lengths: list[int], places: Sequence[str]) -> None:
        highest = int(ids.max(initial=0))
        if highest > self._highest_id:
            self._highest_id = highest
            row = int(np.searchsorted(np.cumsum(lengths), int(ids.argmax()), side="right"))
            token, rows = self._tokenizer.token_of(highest), self._job.vocabulary_rows
            require_id_in_vocabulary(highest, token, rows, self._tokenizer.name, places[row])


def _encode_texts(
    text: OpenedText,
    tokenizer: PairTokenizer,
    job: EncodingJob,
    writer: RowWriter,
    on_progress: Callable[[Progress], None],
) -> dict[str, Any]:
    """A row each; of a pair that is too long the longer text loses its end."""
    labels = LabelReader(job.labels, job.labels_setting, may_name=job.may_name)
    tokenizer.backend.enable_truncation(job.sequence_length, strategy="longest_first")
    cut = source_bytes = 0
    for batch in batches_of(_labelled(text, labels)):
        texts = [_texts_of(piece) for piece in batch]
        encodings = tokenizer.backend.encode_batch_fast([each if len(each) > 1 else each[0] for each in texts])
        lengths = [len(encoding) for encoding in encodings]
        ids = _flat((encoding.ids for encoding in encodings), sum(lengths), np.uint32)
        types = _flat((encoding.type_ids for encoding in encodings), sum(lengths), np.uint8)
        writer.add(ids, types, lengths, [piece.where for piece in batch])
        full = [encoding for encoding in encodings if len(encoding) == job.sequence_length]
        cut += sum(bool(encoding.overflowing) for encoding in full)
        source_bytes += sum(piece.source_bytes for piece in batch)
        on_progress(Progress(writer.rows, source_bytes, text.bytes_total, writer.tokens, "tokenise"))
    if writer.rows == 0:
        return {"notes": []}  # what there is to say is said by who finds no rows
    found, targets, notes = labels.result(job.where)
    writer.save(target_file("labels"), targets)
    numbers = np.arange(writer.rows, dtype=np.int32)
    writer.save(ROW_EXAMPLES_FILE, numbers)
    writer.save(GROUPS_FILE, numbers)
    if cut:
        words = f"{cut:,} of {writer.rows:,} texts ({cut / writer.rows:.1%}) are longer than data.sequence_length"
        words += f" {job.sequence_length:,}: what is beyond is cut off"
        notes.append(f"warning: {words}" if cut > CUT_SHARE * writer.rows else words)
    return {"examples": writer.rows, "groups": writer.rows, "cut_rows": cut, "labels": found.to_json(), "notes": notes}


def _labelled(text: OpenedText, labels: LabelReader) -> Iterator[Piece]:
    """Rows whose label is known; the others are bad rows."""
    for piece in text.pieces:
        assert isinstance(piece.example, LabelledText)
        try:
            labels.take(piece.example.label, piece.where)
        except InputError as problem:
            text.bad.take(problem)
        else:
            yield piece


def _texts_of(piece: Piece) -> tuple[str, ...]:
    assert isinstance(piece.example, LabelledText)
    return piece.example.texts


def _encode_questions(
    text: OpenedText,
    tokenizer: PairTokenizer,
    job: EncodingJob,
    writer: RowWriter,
    on_progress: Callable[[Progress], None],
) -> dict[str, Any]:
    """One row or several for each question."""
    windows = Windows(tokenizer, sequence_length=job.sequence_length, doc_stride=job.doc_stride)
    questions = _QuestionWriter(writer)
    starts: list[int] = []
    ends: list[int] = []
    row_examples: list[int] = []
    outside = source_bytes = 0
    for batch in batches_of(text.pieces):
        kept: list[Window] = []
        places: list[str] = []
        for piece, made in zip(batch, windows.of([_question_of(piece) for piece in batch]), strict=True):
            source_bytes += piece.source_bytes
            if isinstance(made, InputError):
                made.where = piece.where
                text.bad.take(made)
                continue
            question = _question_of(piece)
            row_examples += [questions.add(question)] * len(made)
            outside += sum(window.start == windows.null_position for window in made) if question.answers else 0
            kept += made
            places += [piece.where] * len(made)
        if kept:
            ids, types, offsets = (
                np.concatenate([getattr(window, name) for window in kept]) for name in ("ids", "types", "offsets")
            )
            writer.add(ids, types, [len(window.ids) for window in kept], places)
            writer.write(OFFSETS_FILE, offsets)
        starts += [window.start for window in kept]
        ends += [window.end for window in kept]
        on_progress(Progress(questions.count, source_bytes, text.bytes_total, writer.tokens, "tokenise"))
    for name, values in (("start_positions", starts), ("end_positions", ends)):
        writer.save(target_file(name), np.array(values, dtype=np.int32))
    writer.save(ROW_EXAMPLES_FILE, np.array(row_examples, dtype=np.int32))
    return {
        **questions.close(),
        "null_position": windows.null_position,
        "outside_rows": outside,
        "notes": questions.notes(),
    }


class _QuestionWriter:
    """Appends questions to examples.jsonl, numbers their contexts, and gives every one an id of its own."""

    def __init__(self, writer: RowWriter) -> None:
        self._writer = writer
        self._places: list[int] = []
        self._bytes = 0
        self._contexts: dict[str, int] = {}
        self._groups: list[int] = []
        self._ids: dict[str, int] = {}
        self._renamed = self._unanswerable = 0

    @property
    def count(self) -> int:
        return len(self._places)

    def add(self, question: Question) -> int:
        """Its number."""
        seen = self._ids[question.id] = self._ids.get(question.id, 0) + 1
        name = question.id if seen == 1 else f"{question.id}#{seen}"
        self._renamed += seen > 1
        self._unanswerable += not question.answers
        document = {
            "id": name,
            "question": question.question,
            "context": question.context,
            "answers": [answer.text for answer in question.answers],
        }
        line = json.dumps(document, ensure_ascii=False).encode() + b"\n"
        self._writer.write(EXAMPLES_FILE, line)
        self._places.append(self._bytes)
        self._bytes += len(line)
        self._groups.append(self._contexts.setdefault(question.context, len(self._contexts)))
        return len(self._places) - 1

    def close(self) -> dict[str, Any]:
        self._writer.save(EXAMPLE_PLACES_FILE, np.array(self._places, dtype=np.uint64))
        self._writer.save(GROUPS_FILE, np.array(self._groups, dtype=np.int32))
        return {"examples": self.count, "groups": len(self._contexts), "unanswerable": self._unanswerable}

    def notes(self) -> list[str]:
        if not self._renamed:
            return []
        return [f"{self._renamed:,} questions have the id of an earlier one: in predictions they are ID#2, ID#3, ..."]


def _question_of(piece: Piece) -> Question:
    assert isinstance(piece.example, Question)
    return piece.example


def batches_of(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """As many as are encoded at once."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        example = piece.example
        characters += len(example.context) if isinstance(example, Question) else sum(map(len, _texts_of(piece)))
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_EXAMPLES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _again(first: Piece, rest: Iterator[Piece]) -> Iterator[Piece]:
    yield first
    yield from rest


def _flat(rows: Iterable[Sequence[int]], count: int, dtype: type[Any]) -> npt.NDArray[Any]:
    return np.fromiter(chain.from_iterable(rows), dtype, count)
