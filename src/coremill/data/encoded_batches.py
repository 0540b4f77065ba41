"""Encoded rows to batches: each padded to its own longest row, rows of like length together, on every rank as many.

Every rank works out the rows of the whole step, sorted by length (grouped_order.py), and takes every N-th; so all have
as much to compute, and the rows of a step are the same whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from coremill.data.encoded import EncodedRows
from coremill.data.encoded_split import EncodedSplit
from coremill.data.grouped_order import GroupedOrder, computed_tokens, share_of_rank
from coremill.data.loader import FILLER, EvaluationBatches, RowLoader
from coremill.data.order import Positions

POSITIONS = ("start_positions", "end_positions")  # targets that count tokens, and move where rows are padded in front


@dataclass(frozen=True)
class EncodedBatch:
    """One forward pass of one rank."""

    input_ids: torch.Tensor  # int64 [rows, width]
    attention_mask: torch.Tensor | None  # int64, as these: 1 of a token, 0 of padding; None: there is no padding
    token_type_ids: torch.Tensor | None  # int64, as these
    targets: Mapping[str, torch.Tensor]  # by name, [rows]; without the filler
    row_ids: tuple[int, ...]  # FILLER: one row that is there only to keep all ranks in step
    first_tokens: tuple[int, ...]  # of each row: where it begins behind padding
    lengths: tuple[int, ...]  # in tokens, without padding


class EncodedBatches:
    """Turns row ids into tensors (data/loader.py: BatchMaker, FilledUpRows)."""

    def __init__(self, split: EncodedSplit, *, token_types: bool) -> None:
        """`token_types`: the model has them."""
        self.split, self._token_types = split, token_types
        self.row_tokens = int(split.lengths.max(initial=1))

    def valid_targets(self, row_ids: Positions) -> int:
        """A loss is a mean over samples."""
        return len(row_ids)

    def real_tokens(self, row_ids: Positions) -> int:
        return int(self.split.lengths[row_ids].sum(dtype=np.int64))

    def batch(self, row_ids: Positions, batch_rows: int) -> EncodedBatch:
        """Only a batch without rows gets a filler, of one token: all ranks make as many passes."""
        if not len(row_ids):
            return self._filler()
        ids, mask, types = self.split.padded(row_ids)
        lengths = self.split.lengths[row_ids]
        first = ids.shape[1] - lengths if self.split.padding_side == "left" else np.zeros_like(lengths)
        targets = {
            name: values[row_ids] + (first if name in POSITIONS else 0) for name, values in self.split.targets.items()
        }
        return EncodedBatch(
            input_ids=torch.from_numpy(ids),
            attention_mask=None if mask.all() else torch.from_numpy(mask.astype(np.int64)),
            token_type_ids=torch.from_numpy(types) if self._token_types and types is not None else None,
            targets={name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in targets.items()},
            row_ids=tuple(row_ids.tolist()),
            first_tokens=tuple(first.tolist()),
            lengths=tuple(lengths.tolist()),
        )

    def _filler(self) -> EncodedBatch:
        none = {name: torch.from_numpy(values[:0]) for name, values in self.split.targets.items()}
        return EncodedBatch(torch.full((1, 1), self.split.pad_id), None, None, none, (FILLER,), (0,), (1,))


class EncodedLoader(RowLoader[EncodedBatch]):
    """Steps of rows that differ in length."""

    def __init__(
        self,
        rows: EncodedRows,
        *,
        token_types: bool,
        seed: int,
        rows_per_step: int,
        rank: int,
        world_size: int,
        micro_batch_rows: int,
        accumulation_steps: int,
    ) -> None:
        split = EncodedSplit(rows, "train")
        super().__init__(
            EncodedBatches(split, token_types=token_types),
            rows=split.count,
            key=rows.key,
            seed=seed,
            rows_per_step=rows_per_step,
            rank=rank,
            world_size=world_size,
            micro_batch_rows=micro_batch_rows,
            accumulation_steps=accumulation_steps,
            order=GroupedOrder(split.lengths, seed=seed, rows_per_step=rows_per_step),
        )
        self._lengths = split.lengths

    def _share(self, row_ids: Positions) -> Positions:
        return share_of_rank(row_ids, self._rank, self._world_size)

    def _computed_tokens(self, row_ids: Positions) -> int:
        return computed_tokens(
            self._lengths[row_ids],
            world_size=self._world_size,
            micro_batch_rows=self._micro_batch_rows,
            accumulation_steps=self._accumulation_steps,
        )


class EncodedEvaluation(EvaluationBatches[EncodedBatch]):
    """One rank's share of the rows to evaluate on, the shortest first."""

    def __init__(
        self, maker: EncodedBatches, row_ids: Positions, *, rank: int, world_size: int, micro_batch_rows: int
    ) -> None:
        by_length = row_ids[np.argsort(maker.split.lengths[row_ids], kind="stable")]
        self.valid_targets = maker.valid_targets(row_ids)
        self.tokens = maker.real_tokens(row_ids)
        self.row_ids = tuple(row_ids.tolist())
        self.batch_count = math.ceil(math.ceil(len(row_ids) / world_size) / micro_batch_rows)
        self._maker, self._batch_rows = maker, micro_batch_rows
        self._mine = share_of_rank(by_length, rank, world_size)

    def __iter__(self) -> Iterator[EncodedBatch]:
        size = self._batch_rows
        for index in range(self.batch_count):
            yield self._maker.batch(self._mine[index * size : (index + 1) * size], size)
