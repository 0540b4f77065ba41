"""Encoded rows as arrays, read without torch: the rows of one split, filled up to a batch; which are held out.

split = EncodedSplit(rows, "train")
ids, mask, types = split.padded(row_ids)
split.targets["labels"][row_ids]
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coremill.data.encoded import (
    EXAMPLE_PLACES_FILE,
    EXAMPLES_FILE,
    GROUPS_FILE,
    LENGTHS_FILE,
    OFFSETS_FILE,
    ORIGINS_FILE,
    ROW_EXAMPLES_FILE,
    TOKENS_FILE,
    TYPES_FILE,
    EncodedManifest,
    EncodedRows,
    read_encoded_manifest,
    target_file,
)
from coremill.data.order import Positions, order_key, shuffled
from coremill.data.packed import Split
from coremill.data.row_orders import HOLD_OUT_ORDER
from coremill.errors import InputError, StorageError

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class AskedQuestion:
    """A question as it was read, for comparing answers with."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]  # none: the context has none


class EncodedSplit:
    """The rows of one split, memory-mapped: ranks on a machine share the pages. They are numbered from 0."""

    def __init__(self, rows: EncodedRows, split: Split) -> None:
        apart = split == "evaluation" and rows.evaluation_folder is not None
        folder = rows.evaluation_folder if apart and rows.evaluation_folder is not None else rows.folder
        manifest = read_encoded_manifest(folder)
        if manifest is None:
            do = "start the run again: it will be made anew"
            raise StorageError("the encoded examples are gone or damaged", where=str(folder), do=do)
        self._folder, self._manifest = folder, manifest
        lengths, examples = _load(folder, LENGTHS_FILE), _load(folder, ROW_EXAMPLES_FILE)
        if apart or (split == "train" and not rows.evaluation_fraction):
            self._chosen: Positions = np.arange(manifest.rows, dtype=np.int64)
        elif rows.evaluation_fraction:
            held = examples_held_out(folder, rows.evaluation_fraction, rows.seed)
            self._chosen = np.flatnonzero(held[examples] == (split == "evaluation"))
        else:
            self._chosen = np.zeros(0, dtype=np.int64)
        ends = np.cumsum(lengths, dtype=np.int64)
        self._starts = (ends - lengths)[self._chosen]
        self.count = len(self._chosen)
        self.lengths: npt.NDArray[np.int32] = lengths[self._chosen]
        self.pad_id, self.padding_side = manifest.pad_id, manifest.padding_side
        self.has_types = manifest.has_types
        self.null_position = manifest.null_position
        self.targets = {name: self._target(name) for name in manifest.targets}
        self._tokens = np.memmap(folder / TOKENS_FILE, manifest.dtype, mode="r", shape=(manifest.tokens,))
        shape = (manifest.tokens,)
        self._types = np.memmap(folder / TYPES_FILE, np.uint8, mode="r", shape=shape) if manifest.has_types else None
        # The rows of one example are neighbours, so examples are numbered from 0 in their order.
        self._examples, self.row_examples = np.unique(examples[self._chosen], return_inverse=True)

    def padded(self, row_ids: Positions, width: int | None = None) -> tuple[Ids, Mask, Ids | None]:
        """Ids, which of them are real, and token types where there are any, filled up to `width`, by itself to the
        longest of these rows; at least one token wide."""
        lengths = self.lengths[row_ids]
        wide = max(1, int(lengths.max(initial=0))) if width is None else width
        mask = np.arange(wide) < lengths[:, None]
        if self.padding_side == "left":
            mask = mask[:, ::-1].copy()
        ids = np.full(mask.shape, self.pad_id, dtype=np.int64)
        places = self._places(row_ids, lengths)
        ids[mask] = self._tokens[places]
        if self._types is None:
            return ids, mask, None
        types = np.zeros(mask.shape, dtype=np.int64)
        types[mask] = self._types[places]
        return ids, mask, types

    @property
    def example_count(self) -> int:
        """How many examples the rows are of."""
        return len(self._examples)

    def offsets(self, row_id: int) -> npt.NDArray[np.int32]:
        """Of questions: [tokens, 2], the stretch of the context that each token stands for, -1 where of none."""
        start = int(self._starts[row_id])
        return np.array(self._offsets[start : start + int(self.lengths[row_id])])

    @functools.cached_property
    def _offsets(self) -> npt.NDArray[np.int32]:
        shape = (self._manifest.tokens, 2)
        return np.memmap(self._folder / OFFSETS_FILE, np.int32, mode="r", shape=shape)

    def questions(self) -> Iterator[AskedQuestion]:
        """All, in the order of their numbers (`row_examples`)."""
        return self._read(self._examples)

    def questions_of(self, numbers: Positions) -> Iterator[AskedQuestion]:
        """Some of them, by number."""
        return self._read(self._examples[numbers])

    def origins(self, row_ids: Positions) -> Positions:
        """Of labelled texts: [rows, 2], the file that each comes from, by its number, and which row of it, from 1."""
        found: Positions = _load(self._folder, ORIGINS_FILE)[self._chosen[row_ids]]
        return found

    def _read(self, examples: Positions) -> Iterator[AskedQuestion]:
        places = _load(self._folder, EXAMPLE_PLACES_FILE)
        with (self._folder / EXAMPLES_FILE).open("rb") as stream:
            for number in examples.tolist():
                stream.seek(int(places[number]))
                document = json.loads(stream.readline())
                yield AskedQuestion(**{**document, "answers": tuple(document["answers"])})

    def _target(self, name: str) -> npt.NDArray[Any]:
        values = _load(self._folder, target_file(name))[self._chosen]
        return values if values.dtype.kind == "f" else values.astype(np.int64)

    def _places(self, row_ids: Positions, lengths: npt.NDArray[np.int32]) -> Positions:
        """Where the tokens of these rows stand, one row after the other."""
        before = np.cumsum(lengths, dtype=np.int64) - lengths
        places: Positions = np.repeat(self._starts[row_ids] - before, lengths)
        places += np.arange(len(places))
        return places


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What is left to train on, and what was held out."""

    train_rows: int
    train_examples: int
    train_tokens: int
    longest_row: int  # to train on
    evaluation_rows: int
    evaluation_examples: int
    words: str


def share_out(folder: Path, manifest: EncodedManifest, fraction: float, seed: int) -> HeldOut:
    """Count both sides."""
    lengths, examples = _load(folder, LENGTHS_FILE), _load(folder, ROW_EXAMPLES_FILE)
    held = np.zeros(manifest.examples, dtype=bool)
    words = ""
    if fraction:
        held = examples_held_out(folder, fraction, seed)
        what = "rows" if manifest.kind == "labelled texts" else "questions"
        count = int(held.sum())
        words = f"held out for evaluation: {count:,} of {len(held):,} {what} ({count / len(held):.1%})"
        words += ", with whole contexts" if manifest.kind == "questions" else ""
    trained = ~held[examples]
    return HeldOut(
        train_rows=int(trained.sum()),
        train_examples=int((~held).sum()),
        train_tokens=int(lengths[trained].sum(dtype=np.int64)),
        longest_row=int(lengths[trained].max()),
        evaluation_rows=int((~trained).sum()),
        evaluation_examples=int(held.sum()),
        words=words,
    )


def examples_held_out(folder: Path, fraction: float, seed: int) -> Mask:
    """Which examples are kept for evaluation: whole groups, in an order of the seed's, until they come nearest to the
    share; at least one group on either side."""
    groups = _load(folder, GROUPS_FILE)
    sizes = np.bincount(groups)
    if len(sizes) < 2:
        what = "one row" if len(groups) == 1 else "questions on one context"
        raise InputError(
            f"{what} cannot be shared between training and evaluation",
            where=f"data.evaluation_fraction: {fraction}",
            do="add examples, or set data.evaluation_fraction to 0",
        )
    order = shuffled(np.arange(len(sizes), dtype=np.int64), len(sizes), order_key(seed, HOLD_OUT_ORDER))
    sums = np.cumsum(sizes[order])[:-1]
    count = int(np.argmin(np.abs(sums - fraction * len(groups)))) + 1
    held = np.zeros(len(sizes), dtype=bool)
    held[order[:count]] = True
    chosen: Mask = held[groups]
    return chosen


def _load(folder: Path, name: str) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = np.load(folder / name)
    return values
