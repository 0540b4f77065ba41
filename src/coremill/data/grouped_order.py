"""The order of rows that differ in length: every row once an epoch, rows of like length in one step.

An epoch is shuffled, cut into blocks of many steps, each block sorted by length and cut into its steps, and the steps
of a block are shuffled. So a step wastes little on padding, while which rows meet, and in which order lengths come, is
left to chance. It depends on the seed, the lengths and the rows of a step, and on nothing else: not on ranks, nor on
where a run was stopped.

A step in which one epoch ends and the next begins has rows of both, of any length.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coremill.data.order import Positions, order_key, shuffled
from coremill.data.row_orders import RowOrder

# Purposes of an order, beside those of row_orders.py.
GROUPED_EPOCH_ORDER = 4
STEPS_ORDER = 5
# As many as transformers' own grouping takes, or less where an epoch would be a single block: then the rows of a step
# would be the same in every epoch.
BLOCK_STEPS = 50
FEWEST_BLOCKS = 2
CACHED_BLOCKS = 4

Lengths = npt.NDArray[np.int32]


class GroupedOrder(RowOrder):
    """An endless order; rows `k * rows_per_step` to `(k + 1) * rows_per_step` of it are step k, the shortest first."""

    def __init__(self, lengths: Lengths, *, seed: int, rows_per_step: int) -> None:
        if not 0 < rows_per_step <= len(lengths):
            raise ValueError(f"{rows_per_step} rows a step of {len(lengths)}")
        self._lengths, self._seed, self._step_rows = lengths, seed, rows_per_step
        self._block = functools.lru_cache(maxsize=CACHED_BLOCKS)(self._make_block)

    def rows(self, first: int, count: int) -> Positions:
        size = self._step_rows
        steps = [self._step(step) for step in range(first // size, math.ceil((first + count) / size))]
        begin = first % size
        return np.concatenate([*steps, np.zeros(0, np.int64)])[begin : begin + count]

    def _step(self, step: int) -> Positions:
        """The rows of one step, sorted by length."""
        first, size, rows = step * self._step_rows, self._step_rows, len(self._lengths)
        epoch, position = divmod(first, rows)
        if position + size > rows:  # the epoch ends in it
            left = rows - position
            both = [self._shuffled(epoch, position, left), self._shuffled(epoch + 1, 0, size - left)]
            return self._by_length(np.concatenate(both))
        spans = _Spans.of(epoch * rows, rows, size)
        index = (position - spans.begin) // size
        block = spans.block_of(index)
        at = index - spans.first_step(block)
        found: Positions = self._block(epoch, block)[at]
        return found

    def _make_block(self, epoch: int, block: int) -> npt.NDArray[np.int64]:
        """Its steps in their order: [steps, rows of a step]."""
        rows, size = len(self._lengths), self._step_rows
        spans = _Spans.of(epoch * rows, rows, size)
        first, end = spans.first_step(block), spans.first_step(block + 1)
        drawn = self._shuffled(epoch, spans.begin + first * size, (end - first) * size)
        steps = self._by_length(drawn).reshape(-1, size)
        key = order_key(self._seed, STEPS_ORDER, epoch, block)
        return steps[shuffled(np.arange(len(steps), dtype=np.int64), len(steps), key)]

    def _shuffled(self, epoch: int, position: int, count: int) -> Positions:
        places = np.arange(position, position + count, dtype=np.int64)
        return shuffled(places, len(self._lengths), order_key(self._seed, GROUPED_EPOCH_ORDER, epoch))

    def _by_length(self, row_ids: Positions) -> Positions:
        return row_ids[np.argsort(self._lengths[row_ids], kind="stable")]


@dataclass(frozen=True)
class _Spans:
    """Which stretch of an epoch its whole steps are, and how these are cut into blocks of nearly one size."""

    begin: int  # position in the epoch of the first whole step
    steps: int
    blocks: int

    @classmethod
    def of(cls, first: int, rows: int, size: int) -> _Spans:
        begin = -first % size
        steps = (rows - begin) // size
        return cls(begin, steps, max(math.ceil(steps / BLOCK_STEPS), min(FEWEST_BLOCKS, steps)))

    def first_step(self, block: int) -> int:
        return block * self.steps // self.blocks

    def block_of(self, step: int) -> int:
        return ((step + 1) * self.blocks - 1) // self.steps


def share_of_rank(row_ids: Positions, rank: int, world_size: int) -> Positions:
    """What one rank takes of a step that is sorted by length: every N-th row, so that all have as much to compute."""
    return row_ids[rank::world_size]


def computed_tokens(lengths: Lengths, *, world_size: int, micro_batch_rows: int, accumulation_steps: int) -> int:
    """Tokens that all ranks compute in a step of rows with these lengths, sorted: every micro-batch is as wide as its
    longest row; one without rows has a filler of one token, for all ranks make as many passes."""
    total = 0
    for rank in range(world_size):
        mine = lengths[rank::world_size]
        for index in range(accumulation_steps):
            part = mine[index * micro_batch_rows : (index + 1) * micro_batch_rows]
            total += max(1, len(part)) * max(1, int(part.max(initial=0)))
    return total
