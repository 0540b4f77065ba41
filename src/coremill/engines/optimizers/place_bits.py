"""Random bits that belong to a place: the same for an element of a parameter in a step, whichever rank asks.

For each step a table of bits is drawn, from the seed and the number of the step alone. A stretch of a parameter's rows,
counted in the whole parameter, reads it from an offset that its name and number give: so neither how many ranks there
are nor where a run was interrupted shows in what is rounded up. Nothing is drawn for each element: that would take
longer than the update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from coremill.engines.optimizers.cost import STRETCH_NUMEL


@dataclass(frozen=True)
class Stretch:
    """Rows of a parameter, counted from this rank's first, and the bits that belong to their elements."""

    begin: int
    end: int
    bits: torch.Tensor  # int32, 16 random ones each
    uniform: tuple[torch.Tensor, torch.Tensor]  # fp32 from 0 to below 1, two of them, of other places of the table


class PlaceBits:
    """Bits for all parameters of a model, of which the largest has so many elements, the widest row so many."""

    def __init__(self, seed: int, *, largest_numel: int, widest_row: int) -> None:
        self._seed = seed
        self._numel = 2 * max(widest_row, min(STRETCH_NUMEL, largest_numel))
        self._step = -1
        self._bits = torch.empty(0, dtype=torch.int32)
        self._uniform = torch.empty(0)

    def _draw(self, step: int) -> None:
        """One table at a time, for all parameters of a step."""
        if step == self._step:
            return
        # The step's before first: drawing takes as much again.
        self._bits, self._uniform = torch.empty(0, dtype=torch.int32), torch.empty(0)
        words = np.random.Philox(key=_hash(f"{self._seed}/{step}", 16)).random_raw(-(-self._numel // 4))
        drawn = torch.from_numpy(words.view(np.uint16)[: self._numel].astype(np.int32))
        self._step, self._bits, self._uniform = step, drawn, drawn.flip(0).float().mul_(2.0**-16)

    def stretches(self, name: str, step: int, first_row: int, rows: int, width: int, most: int) -> Iterator[Stretch]:
        """Rows [first_row, first_row + rows) of a parameter, in pieces of at most so many elements, a row at least."""
        self._draw(step)
        rows_of_stretch = max(1, STRETCH_NUMEL // width)
        rows_at_once = max(1, most // width)
        row, end_row = first_row, first_row + rows
        while row < end_row:
            number, inside = divmod(row, rows_of_stretch)
            places = _hash(f"{name}/{number}", 24)
            stretch_end = min(end_row, (number + 1) * rows_of_stretch)
            # What is left of the table behind the offset must hold a whole stretch, whoever has how much of it.
            offsets = self._numel - min(rows_of_stretch * width, self._numel // 2) + 1
            starts = [(places >> shift) % 2**64 % offsets + inside * width for shift in (0, 64, 128)]
            while row < stretch_end:
                count = min(rows_at_once, stretch_end - row)
                cuts = [slice(start, start + count * width) for start in starts]
                begin = row - first_row
                uniform = (self._uniform[cuts[1]], self._uniform[cuts[2]])
                yield Stretch(begin, begin + count, self._bits[cuts[0]], uniform)
                row += count
                starts = [start + count * width for start in starts]


def _hash(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")
