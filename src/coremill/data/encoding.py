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
from typing import Any

import numpy as np
import numpy.typing as npt

from coremill.data.compressed import is_compressed
from coremill.data.encoded import (
    GROUPS_FILE,
    OFFSETS_FILE,
    ORIGINS_FILE,
    ROW_EXAMPLES_FILE,
    ExampleKind,
    target_file,
)
from coremill.data.encoded_writer import QuestionWriter, RowWriter
from coremill.data.examples import LabelledText
from coremill.data.files import parquet_schema
from coremill.data.hub_datasets import schema_of_dataset
from coremill.data.labels import ClassNames, LabelReader, Labels
from coremill.data.packed import Progress
from coremill.data.packing import why_empty
from coremill.data.pair_tokenizer import PairTokenizer, load_pair_tokenizer
from coremill.data.pieces import Piece
from coremill.data.questions import Question
from coremill.data.sources import OpenedText, TextSource, open_text
from coremill.data.windows import Window, Windows
from coremill.errors import InputError

# An encoding of the library has some 300 bytes a token with its offsets, and overlapping windows have more tokens.
BATCH_CHARACTERS = 1 << 20
BATCH_EXAMPLES = 4096
CUT_SHARE = 0.05  # of texts that do not fit a row: beyond it, it is said what to do


@dataclass(frozen=True)
class EncodingJob:
    """How examples become rows."""

    kind: ExampleKind
    sequence_length: int
    doc_stride: int  # tokens that neighbouring windows of a context share
    vocabulary_rows: int
    labels: Labels | None  # asked for
    labels_setting: str  # where
    may_name: bool  # the labels may name classes of which only the count is known
    class_names: ClassNames | None  # what the dataset calls them
    destination: Path
    where: str  # the source, for messages
    files: tuple[str, ...]  # of it, as pieces name them


def encode_source(job: Mapping[str, Any], on_progress: Callable[[Progress], None]) -> dict[str, Any]:
    """Do a job that `Encoder.job_of` (encode.py) describes."""
    source = TextSource.from_json(job["source"])
    tokenizer = load_pair_tokenizer(
        Path(job["tokenizer_folder"]), code_sha256=job["code_sha256"], cache=Path(job["cache"])
    )
    destination = Path(job["destination"])
    os.chdir(destination)  # datasets takes a folder of the same name for the dataset; here there is none
    labels = None if job["labels"] is None else Labels.from_json(job["labels"])
    form = source.examples
    assert form is not None
    names = class_names_of(source, form.columns[-1]) if form.kind == "labelled texts" else ()
    found = EncodingJob(
        kind=form.kind,
        sequence_length=job["sequence_length"],
        doc_stride=job["doc_stride"],
        vocabulary_rows=job["vocabulary_rows"],
        labels=labels,
        labels_setting=job["labels_setting"],
        may_name=job["may_name"],
        class_names=ClassNames(names, f"the features of {source.name}") if names else None,
        destination=destination,
        where=source.where,
        files=source.file_names,
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
    with RowWriter(job.destination, tokenizer, job.vocabulary_rows) as writer:
        encode = _encode_questions if job.kind == "questions" else _encode_texts
        found = encode(text, tokenizer, job, writer, on_progress)
        if writer.rows == 0:
            do = "name files with examples in them"
            raise InputError("the dataset is empty", where=job.where, why=why_empty(0, text.bad), do=do)
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


def _encode_texts(
    text: OpenedText,
    tokenizer: PairTokenizer,
    job: EncodingJob,
    writer: RowWriter,
    on_progress: Callable[[Progress], None],
) -> dict[str, Any]:
    """A row each; of a pair that is too long the longer text loses its end."""
    labels = LabelReader(job.labels, job.labels_setting, may_name=job.may_name, named=job.class_names)
    _require_room(tokenizer, job)
    tokenizer.backend.enable_truncation(job.sequence_length, strategy="longest_first")
    cut = source_bytes = 0
    file_numbers = {file: number for number, file in enumerate(job.files)}
    origins: list[tuple[int, int]] = []
    for batch in batches_of(_labelled(text, labels)):
        origins += [(file_numbers[piece.file], piece.row) for piece in batch]
        texts = [_texts_of(piece) for piece in batch]
        encodings = tokenizer.backend.encode_batch_fast([each if len(each) > 1 else each[0] for each in texts])
        lengths = [len(encoding) for encoding in encodings]
        ids = _flat((encoding.ids for encoding in encodings), sum(lengths), np.uint32)
        types = _flat((encoding.type_ids for encoding in encodings), sum(lengths), np.uint8)
        writer.add(ids, types, lengths, [piece.where for piece in batch])
        full = [encoding for encoding in encodings if len(encoding) == job.sequence_length]
        cut += sum(bool(encoding.overflowing) for encoding in full)
        source_bytes += sum(piece.source_bytes for piece in batch)
        on_progress(Progress(writer.rows, source_bytes, text.bytes_total, writer.tokens, "encode", counted="examples"))
    if writer.rows == 0:
        return {"notes": []}  # what there is to say is said by who finds no rows
    found, targets, notes = labels.result(job.where)
    writer.save(target_file("labels"), targets)
    writer.save(ORIGINS_FILE, np.array(origins, dtype=np.int64))
    numbers = np.arange(writer.rows, dtype=np.int32)
    writer.save(ROW_EXAMPLES_FILE, numbers)
    writer.save(GROUPS_FILE, numbers)
    if cut:
        words = f"{cut:,} of {writer.rows:,} texts ({cut / writer.rows:.1%}) are longer than data.sequence_length"
        words += f" {job.sequence_length:,}: what is beyond is cut off"
        notes.append(f"warning: {words}" if cut > CUT_SHARE * writer.rows else words)
    return {"examples": writer.rows, "groups": writer.rows, "cut_rows": cut, "labels": found.to_json(), "notes": notes}


def _require_room(tokenizer: PairTokenizer, job: EncodingJob) -> None:
    special = int(tokenizer.backend.num_special_tokens_to_add(True))
    if job.sequence_length < special + 2:
        raise InputError(
            "a row has no room for text",
            where=f"data.sequence_length: {job.sequence_length}",
            why=f"the tokenizer puts {special} special tokens around two texts",
            do="set data.sequence_length to 128, or to what your texts need",
        )


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
    questions = QuestionWriter(writer)
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
        on_progress(
            Progress(questions.count, source_bytes, text.bytes_total, writer.tokens, "encode", counted="examples")
        )
    for name, values in (("start_positions", starts), ("end_positions", ends)):
        writer.save(target_file(name), np.array(values, dtype=np.int32))
    writer.save(ROW_EXAMPLES_FILE, np.array(row_examples, dtype=np.int32))
    return {
        **questions.close(),
        "null_position": windows.null_position,
        "outside_rows": outside,
        "notes": questions.notes(),
    }


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


def _flat(rows: Iterable[Sequence[int]], count: int, dtype: type[Any]) -> npt.NDArray[Any]:
    return np.fromiter(chain.from_iterable(rows), dtype, count)
