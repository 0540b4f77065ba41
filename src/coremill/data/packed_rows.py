"""The rows of packings as arrays of token ids, read without torch; what a row's documents are, and their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from coremill.data.mixing import Mix
from coremill.data.order import Positions
from coremill.data.packed import (
    BOUNDARIES_FILE,
    MARKS_FILE,
    ROWS_FILE,
    TOKENS_FILE,
    PackedData,
    Split,
    read_manifest,
)
from coremill.data.row_orders import EpochOrder, MixedOrder, RowOrder
from coremill.errors import StorageError


class PackedRows:
    """The rows of one split, memory-mapped: ranks on a machine share the pages.

    Of several sources they are numbered one source after the other.
    """

    def __init__(self, data: PackedData, split: Split) -> None:
        self.count = data.train_rows if split == "train" else data.evaluation_rows
        self._tokens, self._boundaries, self._marks, self._counts = [], [], [], []
        self.is_marked = data.conversations is not None
        for folder in data.folders(split):
            manifest = read_manifest(folder)
            if manifest is None:
                do = "start the run again: it will be made anew"
                raise StorageError("the packed data is gone or damaged", where=str(folder), do=do)
            shape = (manifest.rows, manifest.sequence_length)
            self._tokens.append(np.memmap(folder / TOKENS_FILE, manifest.dtype, mode="r", shape=shape))
            if self.is_marked:
                self._marks.append(np.memmap(folder / MARKS_FILE, np.uint8, mode="r", shape=shape))
                self._counts.append(np.memmap(folder / ROWS_FILE, np.uint32, mode="r", shape=(manifest.rows, 2)))
            else:
                self._boundaries.append(np.memmap(folder / BOUNDARIES_FILE, np.uint32, mode="r", shape=shape[:1]))
        self._ends = np.cumsum([len(rows) for rows in self._tokens])

    def tokens(self, row_ids: Positions) -> npt.NDArray[np.int64]:
        return self._gathered(self._tokens, row_ids, np.int64)

    def marks(self, row_ids: Positions) -> npt.NDArray[np.uint8]:
        """LEARNED and STARTS of each token, where rows hold conversations."""
        return self._gathered(self._marks, row_ids, np.uint8)

    def learned_and_real(self, row_ids: Positions) -> tuple[int, int]:
        """How many tokens of these rows are learned and how many are real, where rows hold conversations."""
        counts = self._gathered(self._counts, row_ids, np.int64).sum(axis=0)
        return int(counts[0]), int(counts[1])

    def _gathered(self, parts: list[Any], row_ids: Positions, dtype: type[Any]) -> npt.NDArray[Any]:
        if len(parts) == 1:
            return np.asarray(parts[0][row_ids].astype(dtype))
        found = np.empty((len(row_ids), parts[0].shape[1]), dtype=dtype)
        for part, (places, rows) in enumerate(self._by_part(row_ids)):
            found[places] = parts[part][rows]
        return found

    def lost_targets(self, row_ids: Positions) -> int:
        """Targets that are lost where documents may not see each other."""
        parts = enumerate(self._by_part(row_ids))
        return sum(int(self._boundaries[part][rows].sum(dtype=np.int64)) for part, (_, rows) in parts)

    def part_of(self, row_id: int) -> int:
        """Which of several sources a row comes from, by number."""
        return int(np.searchsorted(self._ends, row_id, side="right"))

    def _by_part(self, row_ids: Positions) -> list[tuple[Positions, Positions]]:
        """For each packing: where among `row_ids` its rows stand, and which of its own they are."""
        parts = np.searchsorted(self._ends, row_ids, side="right")
        starts = self._ends - np.diff(self._ends, prepend=0)
        chosen = (np.flatnonzero(parts == part) for part in range(len(self._ends)))
        return [(places, row_ids[places] - starts[part]) for part, places in enumerate(chosen)]


def order_of(data: PackedData, seed: int) -> RowOrder:
    """The order in which training walks these rows."""
    if not data.sources:
        return EpochOrder(data.train_rows, seed)
    shares, rows = zip(*((source.share, source.rows) for source in data.sources), strict=True)
    return MixedOrder(Mix(shares), rows, seed)


def document_starts(rows: npt.NDArray[np.int64], eos_id: int, *, end_begins_next: bool) -> npt.NDArray[np.bool_]:
    """Where in each row a later document begins; its first token is none, whatever document that belongs to."""
    starts = np.zeros(rows.shape, dtype=bool)
    starts[:, 1:] = (rows[:, 1:] if end_begins_next else rows[:, :-1]) == eos_id
    return starts


def learned_tokens(starts: npt.NDArray[np.bool_], *, across: bool, end_begins_next: bool) -> npt.NDArray[np.bool_]:
    """Which tokens of rows the model is trained to say: all but the first of a row, which nothing comes before.

    Where documents may not see each other (not `across`) the same is true of the first of each, unless that is the
    token which ended the one before.
    """
    learned = np.ones(starts.shape, dtype=bool) if across or end_begins_next else ~starts
    learned[:, 0] = False
    return learned
