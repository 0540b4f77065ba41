"""Packed rows to batches of token ids and labels.

Labels follow the Hugging Face convention: equal to the inputs, shifted by the loss, -100 where ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from coremill.data.loader import FILLER, EvaluationBatches, RowLoader
from coremill.data.order import Positions
from coremill.data.packed import BOUNDARIES_FILE, TOKENS_FILE, PackedData, read_manifest
from coremill.errors import InputError, StorageError

IGNORED = -100

Split = Literal["train", "evaluation"]


@dataclass(frozen=True)
class Batch:
    """One forward pass of one rank."""

    input_ids: torch.Tensor  # int64 [rows, length]
    labels: torch.Tensor  # int64 [rows, length]
    position_ids: torch.Tensor | None  # as these, from 0 in each document; None: attention may cross documents
    row_ids: tuple[int, ...]  # row in the packed file, FILLER for a filler


class PackedRows:
    """The rows of one split, memory-mapped: ranks on a machine share the pages."""

    def __init__(self, data: PackedData, split: Split) -> None:
        folder = data.folder
        if split == "evaluation" and data.evaluation_folder is not None:
            folder = data.evaluation_folder
        manifest = read_manifest(folder)
        if manifest is None:
            raise StorageError(
                "the packed data is gone or damaged", where=str(folder), do="start the run again: it will be made anew"
            )
        self.count = data.train_rows if split == "train" else data.evaluation_rows
        self._tokens = np.memmap(
            folder / TOKENS_FILE, manifest.dtype, mode="r", shape=(manifest.rows, manifest.sequence_length)
        )
        self._boundaries = np.memmap(folder / BOUNDARIES_FILE, np.uint32, mode="r", shape=(manifest.rows,))

    def tokens(self, row_ids: Positions) -> npt.NDArray[np.int64]:
        return self._tokens[row_ids].astype(np.int64)

    def lost_targets(self, row_ids: Positions) -> int:
        """Targets that are lost where documents may not see each other."""
        return int(self._boundaries[row_ids].sum(dtype=np.int64))


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
            if self._end_begins_next:  # which the document before it may well be asked for
                starts[: len(row_ids), 1:] = real[:, 1:] == self._eos_id
            else:
                starts[: len(row_ids), 1:] = real[:, :-1] == self._eos_id
                labels[starts] = IGNORED
            columns = np.arange(self.row_tokens)
            position_ids = torch.from_numpy(columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1))
        names = (*(int(row) for row in row_ids), *([FILLER] * fillers))
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), position_ids, names)


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
        _PackedBatches(rows, data, attention_across_documents),
        rows=rows.count,
        key=data.key,
        seed=seed,
        rows_per_step=rows_per_step,
        rank=rank,
        world_size=world_size,
        micro_batch_rows=micro_batch_rows,
        accumulation_steps=accumulation_steps,
    )


def evaluation_batches(
    data: PackedData,
    *,
    rank: int,
    world_size: int,
    micro_batch_rows: int,
    max_rows: int,
    attention_across_documents: bool = True,
) -> EvaluationBatches[Batch]:
    """One rank's share of the evaluation split, of which there may be nothing."""
    rows = PackedRows(data, "evaluation" if data.evaluation_rows else "train")
    return EvaluationBatches(
        _PackedBatches(rows, data, attention_across_documents),
        rows=data.evaluation_rows,
        max_rows=max_rows,
        rank=rank,
        world_size=world_size,
        micro_batch_rows=micro_batch_rows,
    )
