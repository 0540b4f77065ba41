"""Rows to steps: each rank its slice of every step, in an order that depends on the seed only.

Nothing here communicates, and nothing here knows what a row holds: a task's `BatchMaker` turns row ids into tensors.
Every rank works out the rows of the whole step, so the number of valid targets, which the loss is divided by, is the
same number everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from coremill.data.order import Positions
from coremill.data.row_orders import EpochOrder, RowOrder
from coremill.errors import InputError

FILLER = -1  # row id of a row that is there only to keep all ranks in step


class AnyBatch(Protocol):
    """One forward pass of one rank, whatever its tensors are."""

    @property
    def row_ids(self) -> tuple[int, ...]:
        """The rows in it; FILLER for a filler."""


BatchT = TypeVar("BatchT", bound=AnyBatch)
BatchT_co = TypeVar("BatchT_co", bound=AnyBatch, covariant=True)


class BatchMaker(Protocol[BatchT_co]):
    """Turns row ids into tensors; its rows have one length."""

    @property
    def row_tokens(self) -> int:
        """Tokens of one row."""

    def valid_targets(self, row_ids: Positions) -> int:
        """What a loss over these rows is divided by."""

    def batch(self, row_ids: Positions, batch_rows: int) -> BatchT_co:
        """`row_ids`, made up to `batch_rows` with fillers, which have no target."""


@runtime_checkable
class FilledUpRows(Protocol):
    """A `BatchMaker` whose rows may be filled up with padding."""

    def real_tokens(self, row_ids: Positions) -> int:
        """How many tokens of these rows are none of it."""


@dataclass(frozen=True)
class StepBatches(Generic[BatchT_co]):
    """One optimizer step of one rank, with the counts of the whole step."""

    batches: tuple[BatchT_co, ...]  # accumulation_steps of them
    valid_targets: int  # of all ranks
    tokens: int  # real ones, of all ranks
    padding_tokens: int  # in filler rows, and in rows that are filled up, of all ranks
    row_ids: tuple[int, ...]  # of all ranks, in order
    epoch: int  # of the first row


class Loader(Protocol[BatchT_co]):
    """What training asks for batches; its state is part of every checkpoint."""

    def next_step(self) -> StepBatches[BatchT_co]:
        """This rank's batches of the next step."""

    def state(self) -> dict[str, Any]:
        """Where it stands, the same on every rank; `key` names the rows."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with any number of ranks and rows per step."""


class RowLoader(Generic[BatchT]):
    """Walks rows epoch after epoch; the next epoch starts inside the step in which the last one ends."""

    def __init__(
        self,
        maker: BatchMaker[BatchT],
        *,
        rows: int,
        key: str,
        seed: int,
        rows_per_step: int,
        rank: int,
        world_size: int,
        micro_batch_rows: int,
        accumulation_steps: int,
        order: RowOrder | None = None,
    ) -> None:
        """`rows` rows an epoch, which go by the name `key`; without an `order` each once an epoch."""
        share = math.ceil(rows_per_step / world_size)
        if share > micro_batch_rows * accumulation_steps:
            raise ValueError(
                f"{rows_per_step} rows a step on {world_size} ranks are {share} on one, more than"
                f" {accumulation_steps} micro-batches of {micro_batch_rows}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._maker, self._rows, self._key = maker, rows, key
        self._seed, self._rows_per_step = seed, rows_per_step
        self._order = order or EpochOrder(rows, seed)
        self._rank, self._world_size = rank, world_size
        self._micro_batch_rows, self._accumulation_steps = micro_batch_rows, accumulation_steps
        self._next = 0  # rows handed out since the very beginning, by all ranks together

    def next_step(self) -> StepBatches[BatchT]:
        epoch = self._next // self._rows
        row_ids = self._order.rows(self._next, self._rows_per_step)
        self._next += self._rows_per_step
        size = self._micro_batch_rows
        mine = self._share(row_ids)
        batches = tuple(
            self._maker.batch(mine[index * size : (index + 1) * size], size)
            for index in range(self._accumulation_steps)
        )
        tokens = _real_tokens(self._maker, row_ids)
        return StepBatches(
            batches=batches,
            valid_targets=self._maker.valid_targets(row_ids),
            tokens=tokens,
            padding_tokens=self._computed_tokens(row_ids) - tokens,
            row_ids=tuple(int(row) for row in row_ids),
            epoch=epoch,
        )

    def _share(self, row_ids: Positions) -> Positions:
        """This rank's rows of a step."""
        return _slice_of_rank(row_ids, self._rank, self._world_size)

    def _computed_tokens(self, row_ids: Positions) -> int:
        """What all ranks compute in a step, fillers and padding included."""
        return self._world_size * self._accumulation_steps * self._micro_batch_rows * self._maker.row_tokens

    def state(self) -> dict[str, Any]:
        epoch, position = divmod(self._next, self._rows)
        return {"epoch": epoch, "position": position, "seed": self._seed, "rows": self._rows, "key": self._key}

    def restore(self, state: dict[str, Any]) -> None:
        for name, now in (("key", self._key), ("rows", self._rows), ("seed", self._seed)):
            if state[name] != now:
                raise InputError(
                    "the data is not the data this run began with",
                    where="data" if name != "seed" else "train.seed",
                    why=f"its {name} was {state[name]} and is {now}: rows would be left out or seen twice",
                    do="bring the old text, tokenizer, data section and seed back, or start a fresh run",
                )
        self._next = int(state["epoch"]) * self._rows + int(state["position"])


class EvaluationBatches(Generic[BatchT]):
    """This rank's share of an evaluation; iterating reads the rows. All ranks have equally many batches.

    At most `max_rows` rows, spread evenly over all there are, the same every time, each on one rank only.
    """

    def __init__(
        self,
        maker: BatchMaker[BatchT],
        *,
        rows: int,
        max_rows: int | None,  # None: all
        rank: int,
        world_size: int,
        micro_batch_rows: int,
    ) -> None:
        row_ids = evaluation_row_ids(rows, max_rows)
        count = len(row_ids)
        self.valid_targets = maker.valid_targets(row_ids)  # of all ranks, as all of these
        self.tokens = _real_tokens(maker, row_ids)
        self.row_ids = tuple(int(row) for row in row_ids)
        self.batch_count = math.ceil(math.ceil(count / world_size) / micro_batch_rows)  # per rank
        self._maker, self._batch_rows = maker, micro_batch_rows
        self._mine = _slice_of_rank(row_ids, rank, world_size)

    def __len__(self) -> int:
        return self.batch_count

    def __iter__(self) -> Iterator[BatchT]:
        for index in range(self.batch_count):
            first = index * self._batch_rows
            yield self._maker.batch(self._mine[first : first + self._batch_rows], self._batch_rows)


def evaluation_row_ids(rows: int, max_rows: int | None) -> Positions:
    """At most `max_rows` of so many rows, spread evenly; all where that is None."""
    count = rows if max_rows is None else min(max_rows, rows)
    return np.arange(count, dtype=np.int64) * rows // max(1, count)


def _real_tokens(maker: BatchMaker[Any], row_ids: Positions) -> int:
    return maker.real_tokens(row_ids) if isinstance(maker, FilledUpRows) else len(row_ids) * maker.row_tokens


def _slice_of_rank(row_ids: Positions, rank: int, world_size: int) -> Positions:
    count = len(row_ids)
    return row_ids[rank * count // world_size : (rank + 1) * count // world_size]
