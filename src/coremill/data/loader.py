"""Packed rows to batches: each rank its slice of every step, in an order that depends on the seed only.

Nothing here communicates. Every rank works out the rows of the whole step, so the number of valid targets, which the
loss is divided by, is the same number everywhere. Labels follow the Hugging Face convention: equal to the inputs,
shifted by the loss, -100 where ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from coremill.data.order import Positions, order_key, shuffled
from coremill.data.packed import BOUNDARIES_FILE, TOKENS_FILE, PackedData, read_manifest
from coremill.errors import InputError, StorageError

IGNORED = -100
FILLER = -1  # row id of a row that is there only to keep all ranks in step
EPOCH_ORDER = 2  # purpose of an order: no two share a key

Split = Literal["train", "evaluation"]


@dataclass(frozen=True)
class Batch:
    """One forward pass of one rank."""

    input_ids: torch.Tensor  # int64 [rows, length]
    labels: torch.Tensor  # int64 [rows, length]
    position_ids: (
        torch.Tensor | None
    )  # int64 [rows, length], restarting with each document; None: attention may cross documents
    row_ids: tuple[int, ...]  # row in the packed file, FILLER for a filler


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step of one rank, with the counts of the whole step."""

    batches: tuple[Batch, ...]  # accumulation_steps of them
    valid_targets: int  # of all ranks
    tokens: int  # real ones, of all ranks
    padding_tokens: int  # in filler rows, of all ranks
    row_ids: tuple[int, ...]  # of all ranks, in order
    epoch: int  # of the first row


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


class _BatchMaker:
    """Turns row ids into tensors."""

    def __init__(self, rows: PackedRows, data: PackedData, attention_across_documents: bool) -> None:
        self._rows, self._across = rows, attention_across_documents
        self._length, self._eos_id = data.sequence_length, data.eos_id
        self._end_begins_next = data.end_begins_next

    def valid_targets(self, row_ids: Positions) -> int:
        """A row of n tokens has n - 1 targets, less one per later document where none may see across."""
        lost = 0 if self._across else self._rows.lost_targets(row_ids)
        return len(row_ids) * (self._length - 1) - lost

    def batch(self, row_ids: Positions, batch_rows: int) -> Batch:
        """`row_ids`, made up to `batch_rows` with fillers."""
        fillers = batch_rows - len(row_ids)
        real = self._rows.tokens(row_ids)
        ids = np.concatenate([real, np.full((fillers, self._length), self._eos_id, np.int64)]) if fillers else real
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
            columns = np.arange(self._length)
            position_ids = torch.from_numpy(columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1))
        names = (*(int(row) for row in row_ids), *([FILLER] * fillers))
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), position_ids, names)


class RowLoader:
    """Walks the rows of a split epoch after epoch; the next epoch starts inside the step in which the last one ends."""

    def __init__(
        self,
        data: PackedData,
        *,
        split: Split = "train",
        seed: int,
        rows_per_step: int,
        rank: int,
        world_size: int,
        micro_batch_rows: int,
        accumulation_steps: int,
        attention_across_documents: bool = True,
    ) -> None:
        share = math.ceil(rows_per_step / world_size)
        if share > micro_batch_rows * accumulation_steps:
            raise ValueError(
                f"{rows_per_step} rows a step on {world_size} ranks are {share} on one, more than"
                f" {accumulation_steps} micro-batches of {micro_batch_rows}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._rows = PackedRows(data, split)
        if self._rows.count == 0:
            raise InputError(
                f"there are no rows for {split}", where=f"data, split {split}", do="name a source with text"
            )
        self._maker = _BatchMaker(self._rows, data, attention_across_documents)
        self._data, self._seed, self._rows_per_step = data, seed, rows_per_step
        self._rank, self._world_size = rank, world_size
        self._micro_batch_rows, self._accumulation_steps = micro_batch_rows, accumulation_steps
        self._next = 0  # rows handed out since the very beginning, by all ranks together

    @property
    def rows_per_epoch(self) -> int:
        """Rows in one pass over the split."""
        return self._rows.count

    @property
    def rows_done(self) -> int:
        """Rows handed out so far, by all ranks together."""
        return self._next

    def next_step(self) -> StepBatches:
        """This rank's batches of the next step."""
        epoch = self._next // self._rows.count
        row_ids = self._global_rows(self._next, self._rows_per_step)
        self._next += self._rows_per_step
        size = self._micro_batch_rows
        mine = _slice_of_rank(row_ids, self._rank, self._world_size)
        batches = tuple(
            self._maker.batch(mine[index * size : (index + 1) * size], size)
            for index in range(self._accumulation_steps)
        )
        computed_rows = self._world_size * self._accumulation_steps * size
        length = self._data.sequence_length
        return StepBatches(
            batches=batches,
            valid_targets=self._maker.valid_targets(row_ids),
            tokens=len(row_ids) * length,
            padding_tokens=(computed_rows - len(row_ids)) * length,
            row_ids=tuple(int(row) for row in row_ids),
            epoch=epoch,
        )

    def state(self) -> dict[str, Any]:
        """Where the loader stands; the same on every rank."""
        epoch, position = divmod(self._next, self._rows.count)
        return {
            "epoch": epoch,
            "position": position,
            "seed": self._seed,
            "rows": self._rows.count,
            "key": self._data.key,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with any number of ranks and rows per step."""
        for name, now in (("key", self._data.key), ("rows", self._rows.count), ("seed", self._seed)):
            if state[name] != now:
                raise InputError(
                    "the data is not the data this run began with",
                    where="data" if name != "seed" else "train.seed",
                    why=f"its {name} was {state[name]} and is {now}: rows would be left out or seen twice",
                    do="bring the old text, tokenizer, data section and seed back, or start a fresh run",
                )
        self._next = int(state["epoch"]) * self._rows.count + int(state["position"])

    def _global_rows(self, first: int, count: int) -> Positions:
        """Rows `first` up to `first + count` of the endless order, epoch by epoch."""
        parts: list[Positions] = []
        while count:
            epoch, position = divmod(first, self._rows.count)
            taken = min(count, self._rows.count - position)
            positions = np.arange(position, position + taken, dtype=np.int64)
            key = order_key(self._seed, EPOCH_ORDER, epoch)
            parts.append(shuffled(positions, self._rows.count, key))
            first += taken
            count -= taken
        return np.concatenate(parts)


@dataclass(frozen=True)
class EvaluationBatches:
    """This rank's share of an evaluation; iterating reads the rows. All ranks have equally many batches."""

    valid_targets: int  # of all ranks
    tokens: int  # real ones, of all ranks
    row_ids: tuple[int, ...]  # of all ranks
    batch_count: int  # per rank
    _maker: _BatchMaker
    _mine: Positions
    _batch_rows: int

    def __len__(self) -> int:
        return self.batch_count

    def __iter__(self) -> Iterator[Batch]:
        for index in range(self.batch_count):
            first = index * self._batch_rows
            yield self._maker.batch(self._mine[first : first + self._batch_rows], self._batch_rows)


def evaluation_batches(
    data: PackedData,
    *,
    rank: int,
    world_size: int,
    micro_batch_rows: int,
    max_rows: int,
    attention_across_documents: bool = True,
) -> EvaluationBatches:
    """At most `max_rows` rows, spread evenly over the evaluation split, the same every time, each on one rank only."""
    rows = PackedRows(data, "evaluation") if data.evaluation_rows else PackedRows(data, "train")
    count = min(max_rows, data.evaluation_rows)
    row_ids = np.arange(count, dtype=np.int64) * data.evaluation_rows // max(1, count)
    maker = _BatchMaker(rows, data, attention_across_documents)
    return EvaluationBatches(
        valid_targets=maker.valid_targets(row_ids),
        tokens=count * data.sequence_length,
        row_ids=tuple(int(row) for row in row_ids),
        batch_count=math.ceil(math.ceil(count / world_size) / micro_batch_rows),
        _maker=maker,
        _mine=_slice_of_rank(row_ids, rank, world_size),
        _batch_rows=micro_batch_rows,
    )


def _slice_of_rank(row_ids: Positions, rank: int, world_size: int) -> Positions:
    count = len(row_ids)
    return row_ids[rank * count // world_size : (rank + 1) * count // world_size]
