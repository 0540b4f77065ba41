"""Packed rows to batches of token ids and labels.

Labels follow the Hugging Face convention: equal to the inputs, shifted by the loss, -100 where ignored: fillers, and of
conversations all that is not learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from coremill.data.loader import FILLER, EvaluationBatches, RowLoader
from coremill.data.order import Positions
from coremill.data.packed import LEARNED, STARTS, PackedData
from coremill.data.packed_rows import PackedRows, document_starts, order_of
from coremill.errors import InputError

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """One forward pass of one rank."""

    input_ids: torch.Tensor  # int64 [rows, length]
    labels: torch.Tensor  # int64 [rows, length]
    position_ids: torch.Tensor | None  # as these, from 0 in each document; None: attention may cross documents
    row_ids: tuple[int, ...]  # row in the packed file, FILLER for a filler


class _PackedBatches:
    """Turns row ids into tensors."""

    def __init__(self, rows: PackedRows, data: PackedData, attention_across_documents: bool) -> None:
        self._rows, self._across = rows, attention_across_documents
        self.row_tokens, self._eos_id = data.sequence_length, data.eos_id
        self._end_begins_next = data.end_begins_next

    def valid_targets(self, row_ids: Positions) -> int:
        """A row of n tokens has n - 1 targets, less one per later document where none may see across."""
        lost = 0 if self._across else self._rows.lost_targets(row_ids)
        return len(row_ids) * (self.row_tokens - 1) - lost

    def batch(self, row_ids: Positions, batch_rows: int) -> Batch:
        fillers = batch_rows - len(row_ids)
        real = self._rows.tokens(row_ids)
        ids = np.concatenate([real, np.full((fillers, self.row_tokens), self._eos_id, np.int64)]) if fillers else real
        labels = ids.copy()
        labels[len(row_ids) :] = IGNORED
        position_ids = None
        if not self._across:
            starts = np.zeros(ids.shape, dtype=bool)
            starts[: len(row_ids)] = document_starts(real, self._eos_id, end_begins_next=self._end_begins_next)
            if not self._end_begins_next:  # which the document before it may well be asked for
                labels[starts] = IGNORED
            position_ids = _positions(starts)
        names = (*(int(row) for row in row_ids), *([FILLER] * fillers))
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), position_ids, names)


class _ConversationBatches:
    """The same for conversations: what is learned, and where one begins, is in their marks."""

    def __init__(self, rows: PackedRows, data: PackedData, attention_across_documents: bool) -> None:
        self._rows, self._across = rows, attention_across_documents
        self.row_tokens, self._filler_id = data.sequence_length, data.eos_id

    def valid_targets(self, row_ids: Positions) -> int:
        return self._rows.learned_and_real(row_ids)[0]

    def real_tokens(self, row_ids: Positions) -> int:
        return self._rows.learned_and_real(row_ids)[1]

    def batch(self, row_ids: Positions, batch_rows: int) -> Batch:
        shape, count = (batch_rows, self.row_tokens), len(row_ids)
        ids, marks = np.full(shape, self._filler_id, np.int64), np.zeros(shape, np.uint8)
        ids[:count], marks[:count] = self._rows.tokens(row_ids), self._rows.marks(row_ids)
        labels = np.where(marks & LEARNED, ids, IGNORED)
        position_ids = None if self._across else _positions((marks & STARTS) != 0)
        names = (*(int(row) for row in row_ids), *([FILLER] * (batch_rows - count)))
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), position_ids, names)


def _positions(starts: npt.NDArray[np.bool_]) -> torch.Tensor:
    """From 0 in each document."""
    columns = np.arange(starts.shape[1])
    return torch.from_numpy(columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1))


def _maker(rows: PackedRows, data: PackedData, across: bool) -> _PackedBatches | _ConversationBatches:
    return (_ConversationBatches if rows.is_marked else _PackedBatches)(rows, data, across)


def make_loader(
    data: PackedData,
    *,
    seed: int,
    rows_per_step: int,
    rank: int,
    world_size: int,
    micro_batch_rows: int,
    accumulation_steps: int,
    attention_across_documents: bool = True,
) -> RowLoader[Batch]:
    """The steps of one rank over the rows to train on."""
    rows = PackedRows(data, "train")
    if rows.count == 0:
        raise InputError("there are no rows for train", where="data, split train", do="name a source with text")
    return RowLoader(
        _maker(rows, data, attention_across_documents),
        rows=rows.count,
        key=data.key,
        seed=seed,
        rows_per_step=rows_per_step,
        rank=rank,
        world_size=world_size,
        micro_batch_rows=micro_batch_rows,
        accumulation_steps=accumulation_steps,
        order=order_of(data, seed),
    )


def evaluation_batches(
    data: PackedData,
    *,
    rank: int,
    world_size: int,
    micro_batch_rows: int,
    max_rows: int | None,
    attention_across_documents: bool = True,
) -> EvaluationBatches[Batch]:
    """One rank's share of the evaluation split, of which there may be nothing."""
    rows = PackedRows(data, "evaluation" if data.evaluation_rows else "train")
    return EvaluationBatches(
        _maker(rows, data, attention_across_documents),
        rows=data.evaluation_rows,
        max_rows=max_rows,
        rank=rank,
        world_size=world_size,
        micro_batch_rows=micro_batch_rows,
    )
