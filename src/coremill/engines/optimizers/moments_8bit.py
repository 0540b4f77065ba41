"""Moments of gradients in 8 bits: blocks of a row share a scale, so that cutting a parameter by rows changes nothing.

Of the first moment the root is kept, with its sign, and of the second the fourth root: so small elements of a block
have levels too. Both are rounded up or down by chance: a moment moves by a thousandth of a gradient's square in a step,
and rounded to the nearest level it would not move at all. The second moment's lowest level is 1: at 0, which small
values would be rounded to, the update would be divided by nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from coremill.engines.optimizers.cost import BLOCK

# Under these names a checkpoint has them; scales of both in one row for each row of the weight.
FIRST, FIRST_SCALE = "exp_avg_root_8bit", "exp_avg_root_scale"
SECOND, SECOND_SCALE = "exp_avg_sq_fourth_root_8bit", "exp_avg_sq_fourth_root_scale"
STATE_NAMES = (FIRST, FIRST_SCALE, SECOND, SECOND_SCALE)
# Those of AdamW, and of vectors here, by torch's names.
ADAMW_NAMES = ("exp_avg", "exp_avg_sq")
CONVERTED_AT_ONCE_NUMEL = 2**20

# What the largest element of a block becomes; a little less, so that no chance rounds it up past the last level.
FIRST_LEVELS, SECOND_LEVELS = 127, 255
JUST_BELOW = 1 - 2.0**-18
# Below that a block is as good as zeros: there are no finite levels for it (127**2 over it must be a number in fp32).
LEAST = 1e-34
# A gradient may be finite and its square not: it becomes the last level of a block this large.
MOST = 1e37


@dataclass(frozen=True)
class RowLayout:
    """How a row of a weight is laid out for arithmetic: whole blocks, the last one filled up with zeros.

    Then vector instructions see the same lanes wherever a row lies, and every rank rounds alike."""

    columns: int  # of a row
    blocks: int
    block: int  # elements of one, those that fill it up included

    @property
    def width(self) -> int:
        return self.blocks * self.block

    @classmethod
    def of(cls, shape: Sequence[int]) -> RowLayout:
        """Of a weight with at least two dimensions. Rows shorter than a block have one of their own size; a row of
        several dimensions (a mixture's expert) counts as several."""
        columns = shape[-1]
        for more in reversed(shape[1:-1]):
            if columns >= BLOCK:
                break
            columns *= more
        if columns >= BLOCK:
            return cls(columns, -(-columns // BLOCK), BLOCK)
        return cls(columns, 1, -(-columns // 16) * 16)


@dataclass(frozen=True)
class Moments8bit:
    """Of the rows of a weight that a rank holds: [rows, columns] of levels, [rows, blocks] of scales."""

    first: torch.Tensor
    first_scale: torch.Tensor
    second: torch.Tensor
    second_scale: torch.Tensor
    layout: RowLayout

    @classmethod
    def zeros(cls, rows: int, layout: RowLayout) -> Moments8bit:
        def scales() -> torch.Tensor:
            return torch.zeros(rows, layout.blocks)

        shape = (rows, layout.columns)
        return cls(
            torch.zeros(shape, dtype=torch.int8), scales(), torch.zeros(shape, dtype=torch.uint8), scales(), layout
        )

    def named(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """For a checkpoint, where they lie; levels in the weight's shape."""
        levels = {FIRST: self.first.view(shape), SECOND: self.second.view(shape)}
        scales = {FIRST_SCALE: self.first_scale, SECOND_SCALE: self.second_scale}
        return {**levels, **{name: scale.view(shape[0], -1) for name, scale in scales.items()}}

    @classmethod
    def from_named(cls, state: Mapping[str, torch.Tensor], layout: RowLayout) -> Moments8bit:
        levels = [state[name].view(-1, layout.columns) for name in (FIRST, SECOND)]
        scales = [state[name].view(-1, layout.blocks) for name in (FIRST_SCALE, SECOND_SCALE)]
        return cls(levels[0], scales[0], levels[1], scales[1], layout)

    def read(self, begin: int, end: int, first: torch.Tensor, second: torch.Tensor, work: torch.Tensor) -> None:
        """Rows [begin, end) as they are computed with, into [rows, width] of fp32."""
        columns, block = self.layout.columns, self.layout.block
        fill(first, self.first[begin:end], columns)
        first.mul_(torch.abs(first, out=work))
        first.view(-1, block).mul_(self.first_scale[begin:end].view(-1, 1))
        fill(second, self.second[begin:end], columns)
        second.view(-1, block).mul_(self.second_scale[begin:end].view(-1, 1))
        second.mul_(second).mul_(second)

    def write(
        self,
        begin: int,
        end: int,
        first: torch.Tensor,
        second: torch.Tensor,
        uniform: tuple[torch.Tensor, torch.Tensor],
        work: torch.Tensor,
    ) -> None:
        """The inverse, rounded by `uniform`, numbers from 0 to below 1; what it is given is used up."""
        columns, block = self.layout.columns, self.layout.block
        roots = second.sqrt_().sqrt_().view(-1, block)
        per_level = _levels(roots, SECOND_LEVELS, self.second_scale[begin:end])
        torch.addcmul(uniform[1].view(roots.shape), roots, per_level, out=roots)
        # From fp32 straight to bytes without a sign takes twice as long.
        whole = work.view(torch.int32).copy_(second.clamp_(min=1.0, max=SECOND_LEVELS))
        self.second[begin:end].copy_(cut(whole, columns))
        sizes = torch.abs(first, out=work).view(-1, block)
        squares = sizes.mul_(_levels(sizes, FIRST_LEVELS**2, self.first_scale[begin:end])).clamp_(max=FIRST_LEVELS**2)
        # As far past the level below as chance says: squares of levels, not levels, come out right in the mean.
        below, chance = second.view(squares.shape), uniform[0].view(squares.shape)
        torch.sqrt(squares, out=below).floor_()
        squares.add_(chance).addcmul_(below, chance, value=2).sqrt_()
        self.first[begin:end].copy_(cut(torch.copysign(work, first, out=first), columns))


def _levels(sizes: torch.Tensor, levels: int, scale: torch.Tensor) -> torch.Tensor:
    """Write each block's scale; what its sizes become levels by."""
    largest = torch.amax(sizes, dim=1, keepdim=True).clamp_(min=LEAST, max=MOST)
    torch.div(largest, levels, out=scale.view(-1, 1))
    return largest.reciprocal_().mul_(levels * JUST_BELOW)


def fill(wide: torch.Tensor, values: torch.Tensor, columns: int) -> None:
    """Rows into rows that may be wider: zeros behind them."""
    if columns == wide.shape[1]:
        wide.copy_(values)
        return
    wide[:, :columns].copy_(values)
    wide[:, columns:].zero_()


def cut(wide: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse: rows without what fills them up."""
    return wide if columns == wide.shape[1] else wide[:, :columns]


def quantised(state: Mapping[str, torch.Tensor], layout: RowLayout) -> Moments8bit:
    """Of AdamW's two moments in fp32: each to the nearest level, a piece at a time; what is given is not used up."""
    first, second = (state[name].view(-1, layout.columns) for name in ADAMW_NAMES)
    made = Moments8bit.zeros(len(first), layout)
    for begin, end in _pieces(len(first), layout):
        work = torch.empty(3, end - begin, layout.width)
        fill(work[0], first[begin:end], layout.columns)
        fill(work[1], second[begin:end], layout.columns)
        half = torch.full_like(work[2], 0.5)
        made.write(begin, end, work[0], work[1], (half, half), work[2])
    return made


def with_fp32_moments(state: Mapping[str, torch.Tensor], shape: torch.Size) -> Mapping[str, torch.Tensor]:
    """The inverse of it, but for the rounding; anything else is left as it is."""
    if sorted(state) != sorted(STATE_NAMES):
        return state
    moments = Moments8bit.from_named(state, RowLayout.of(shape))
    rows, columns = moments.first.shape
    made = {name: torch.empty(rows, columns) for name in ADAMW_NAMES}
    for begin, end in _pieces(rows, moments.layout):
        work = torch.empty(3, end - begin, moments.layout.width)
        moments.read(begin, end, work[0], work[1], work[2])
        for name, values in zip(ADAMW_NAMES, work[:2], strict=True):
            made[name][begin:end].copy_(values[:, :columns])
    return {name: tensor.view(shape) for name, tensor in made.items()}


def _pieces(rows: int, layout: RowLayout) -> Iterator[tuple[int, int]]:
    at_once = max(1, CONVERTED_AT_ONCE_NUMEL // layout.width)
    return ((begin, min(rows, begin + at_once)) for begin in range(0, rows, at_once))
