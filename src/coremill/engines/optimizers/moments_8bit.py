"""Moments of gradients in 8 bits: blocks of a row share a scale, so that cutting a parameter by rows changes nothing.

The first moment is signed and linear; of the second its root is kept, which spans half as many powers of two. Both are
rounded up or down by chance, in the mean to what they are: a moment moves by a thousandth of a gradient's square in a
step, and rounded to the nearest level it would not move at all. The root's lowest level is 1: at 0, which small values
would be rounded to, the update would be divided by nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from coremill.engines.optimizers.cost import BLOCK

# Under these names a checkpoint has them; scales of both in one row for each row of the weight.
FIRST, FIRST_SCALE, ROOT, ROOT_SCALE = "exp_avg_8bit", "exp_avg_scale", "exp_avg_sq_root_8bit", "exp_avg_sq_root_scale"
STATE_NAMES = (FIRST, FIRST_SCALE, ROOT, ROOT_SCALE)
# Those of AdamW, and of vectors here, by torch's names.
ADAMW_NAMES = ("exp_avg", "exp_avg_sq")
CONVERTED_AT_ONCE_NUMEL = 2**20

# What the largest element of a block becomes; a little less, so that no chance rounds it up past the last level.
FIRST_LEVELS, ROOT_LEVELS = 127, 255
JUST_BELOW = 1 - 2.0**-18
# Below that a block is as good as zeros: there are no finite levels for it.
LEAST = 1e-35
# A gradient may be finite and its square not: its root becomes the last level of a block this large.
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
    root: torch.Tensor
    root_scale: torch.Tensor
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
        levels = {FIRST: self.first.view(shape), ROOT: self.root.view(shape)}
        scales = {FIRST_SCALE: self.first_scale, ROOT_SCALE: self.root_scale}
        return {**levels, **{name: scale.view(shape[0], -1) for name, scale in scales.items()}}

    @classmethod
    def from_named(cls, state: Mapping[str, torch.Tensor], layout: RowLayout) -> Moments8bit:
        levels = [state[name].view(-1, layout.columns) for name in (FIRST, ROOT)]
        scales = [state[name].view(-1, layout.blocks) for name in (FIRST_SCALE, ROOT_SCALE)]
        return cls(levels[0], scales[0], levels[1], scales[1], layout)

    def read(self, begin: int, end: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Rows [begin, end) as they are computed with, into [rows, width] of fp32; the second moment, not its root."""
        columns, block = self.layout.columns, self.layout.block
        fill(first, self.first[begin:end], columns)
        first.view(-1, block).mul_(self.first_scale[begin:end].view(-1, 1))
        fill(second, self.root[begin:end], columns)
        second.view(-1, block).mul_(self.root_scale[begin:end].view(-1, 1))
        second.mul_(second)

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
        torch.abs(first, out=work)
        _into_levels(first, work, FIRST_LEVELS, self.first_scale[begin:end], uniform[0], block)
        self.first[begin:end].copy_(cut(first.floor_(), columns))
        root = second.sqrt_()
        _into_levels(root, root, ROOT_LEVELS, self.root_scale[begin:end], uniform[1], block)
        # From fp32 straight to bytes without a sign takes twice as long.
        whole = work.view(torch.int32).copy_(root.clamp_(min=1.0, max=ROOT_LEVELS))
        self.root[begin:end].copy_(cut(whole, columns))


def _into_levels(
    values: torch.Tensor,
    sizes: torch.Tensor,
    levels: int,
    scale: torch.Tensor,
    uniform: torch.Tensor,
    block: int,
) -> None:
    """Write each block's scale; values become levels, plus what chance adds before the fraction is cut off."""
    largest = torch.amax(sizes.view(-1, block), dim=1, keepdim=True).clamp_(min=LEAST, max=MOST)
    torch.div(largest, levels, out=scale.view(-1, 1))
    blocks = values.view(-1, block)
    torch.addcmul(uniform.view(blocks.shape), blocks, largest.reciprocal_().mul_(levels * JUST_BELOW), out=blocks)


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
        work = torch.empty(2, end - begin, moments.layout.width)
        moments.read(begin, end, work[0], work[1])
        for name, values in zip(ADAMW_NAMES, work, strict=True):
            made[name][begin:end].copy_(values[:, :columns])
    return {name: tensor.view(shape) for name, tensor in made.items()}


def _pieces(rows: int, layout: RowLayout) -> Iterator[tuple[int, int]]:
    at_once = max(1, CONVERTED_AT_ONCE_NUMEL // layout.width)
    return ((begin, min(rows, begin + at_once)) for begin in range(0, rows, at_once))
