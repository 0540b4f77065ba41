"""In which order a run walks its rows: epoch after epoch, each shuffled; or sources in shares, pass after pass.

Any stretch can be asked for, and depends on the seed and nothing else: not on ranks, nor on where a run was stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coremill.data.mixing import Mix
from coremill.data.order import Positions, order_key, shuffled

# Purposes of an order: no two share a key.
HOLD_OUT_ORDER = 1
EPOCH_ORDER = 2
PASS_ORDER = 3


class RowOrder(Protocol):
    """An endless order of row numbers."""

    def rows(self, first: int, count: int) -> Positions:
        """Rows `first` up to `first + count` of it."""


@dataclass(frozen=True)
class EpochOrder(RowOrder):
    """Every row once an epoch."""

    row_count: int
    seed: int

    def rows(self, first: int, count: int) -> Positions:
        """Epoch by epoch."""
        parts: list[Positions] = []
        while count:
            epoch, position = divmod(first, self.row_count)
            taken = min(count, self.row_count - position)
            positions = np.arange(position, position + taken, dtype=np.int64)
            parts.append(shuffled(positions, self.row_count, order_key(self.seed, EPOCH_ORDER, epoch)))
            first += taken
            count -= taken
        return np.concatenate(parts)


@dataclass(frozen=True)
class MixedOrder(RowOrder):
    """Sources in shares, whose rows are numbered one source after the other; each goes through its own again and again.

    Of one source no row comes a second time before all have come once.
    """

    mix: Mix
    rows_per_source: tuple[int, ...]
    seed: int

    def rows(self, first: int, count: int) -> Positions:
        """Source by source, put in the places the mix gives them."""
        draws = np.array(list(self.mix.draws(first, count)), dtype=np.int64).reshape(-1, 2)
        found = np.empty(len(draws), dtype=np.int64)
        before = 0
        for source, row_count in enumerate(self.rows_per_source):
            places = np.flatnonzero(draws[:, 0] == source)
            passes, positions = np.divmod(draws[places, 1], row_count)
            for each in np.unique(passes):
                now = passes == each
                key = order_key(self.seed, PASS_ORDER, source, int(each))
                found[places[now]] = shuffled(positions[now], row_count, key) + before
            before += row_count
        return found
