"""Sources in shares: which source gives each row of a run, and which of its rows. Pure arithmetic, without numpy.

Row j of a source with share s is due at time (j + 1/2) / s, in rows of the run; rows come in the order they are due. So
every stretch of the run, each step and each epoch, has the shares that were asked for, to within a row or two, and any
stretch can be told without those before it. The rows of a source come pass after pass, each in an order of its own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mix:
    """The endless order of sources."""

    shares: tuple[float, ...]  # of the rows, together 1

    def taken(self, rows: int) -> tuple[int, ...]:
        """How many of the first `rows` rows come from each source."""
        counts = self._surely_taken(rows)
        for source, index in self._from(counts):
            if sum(counts) >= rows:
                break
            counts[source] = index + 1
        return tuple(counts)

    def draws(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """For rows `first` up to `first + count`: the source, and how many of its rows came before this one."""
        rows = self._from(list(self.taken(first)))
        for _ in range(count):
            yield next(rows)

    def _from(self, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """What follows once so many rows of each source are taken."""
        due = [((index + 0.5) / share, source, index) for source, (index, share) in self._each(counts)]
        heapq.heapify(due)
        while True:
            _, source, index = due[0]
            yield source, index
            heapq.heapreplace(due, ((index + 1.5) / self.shares[source], source, index + 1))

    def _each(self, counts: Sequence[int]) -> Iterator[tuple[int, tuple[int, float]]]:
        return enumerate(zip(counts, self.shares, strict=True))

    def _surely_taken(self, rows: int) -> list[int]:
        """At most as many as `taken`, and nearly: the n-th row is due at n, give or take half a row for each source."""
        return [max(0, math.floor(share * (rows - len(self.shares))) - 1) for share in self.shares]


def shares_of(asked: Sequence[float | None], rows: Sequence[int]) -> tuple[float, ...]:
    """Shares that add up to 1: those asked for, or, where none is, those the sources have by their size."""
    weights = [float(count) if share is None else share for share, count in zip(asked, rows, strict=True)]
    return tuple(weight / math.fsum(weights) for weight in weights)
