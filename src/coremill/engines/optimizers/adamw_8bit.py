"""AdamW with moments in 8 bits, over weights in the dtype that they are computed with: no fp32 copy of either.

Goes through each weight in pieces that stay in the caches: moments and weight become fp32, torch's fused AdamW moves
them, and they are rounded back by bits that belong to their place (place_bits.py). bf16 has 8 bits of its own, so most
updates are smaller than half its last one, and to the nearest they would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from coremill.engines.base import require_state_names
from coremill.engines.optimizers import OptimizerSettings
from coremill.engines.optimizers.adamw import undecayed
from coremill.engines.optimizers.cost import NUMEL_AT_ONCE
from coremill.engines.optimizers.moments_8bit import (
    ADAMW_NAMES,
    STATE_NAMES,
    Moments8bit,
    RowLayout,
    cut,
    fill,
    quantised,
)
from coremill.engines.optimizers.place_bits import PlaceBits
from coremill.model.slices import RowSlice

VECTOR = RowLayout(1, 1, 1)  # its rows are its elements
# What vector instructions take at once, at most: what is left over they would round otherwise.
LANES = 16


@dataclass
class _Held:
    """Of one weight."""

    name: str
    first_row: int  # of this rank's, in the whole
    weight_decay: float
    layout: RowLayout
    moments: Moments8bit | dict[str, torch.Tensor] | None = None  # of a vector in fp32; None before the first update
    updates: int = 0


class AdamW8bit:
    """Over bf16 or fp32 weights."""

    def __init__(
        self,
        model: nn.Module,
        trainable: Sequence[tuple[str, torch.Tensor]],
        settings: OptimizerSettings,
        slices: Sequence[RowSlice],
    ) -> None:
        """`slices`: of every parameter that is saved, those of which this rank has no rows too."""
        self._settings = settings
        left_out = undecayed(model, settings.no_decay)
        pieces = {piece.local: piece for piece in slices}
        self._held = {
            weight: _Held(
                name=pieces[weight].name,
                first_row=pieces[weight].start * pieces[weight].row_elements // layout_of(pieces[weight].shape).columns,
                weight_decay=0.0 if name in left_out else settings.weight_decay,
                layout=layout_of(pieces[weight].shape),
            )
            for name, weight in trainable
        }
        shapes = [torch.Size(piece.shape) for piece in slices if piece.local.requires_grad]
        layouts = [(layout_of(shape), shape.numel()) for shape in shapes]
        self._bits = PlaceBits(
            settings.seed,
            largest_numel=max((numel // layout.columns * layout.width for layout, numel in layouts), default=1),
            widest_row=max((layout.width for layout, _ in layouts), default=1),
        )
        self._work = torch.empty(0)
        self._steps = 1  # with the one that is under way

    def begin_step(self) -> None:
        """Random bits are drawn once for all weights of a step, though some were moved in fewer (experts, say)."""
        self._steps = 1 + max((held.updates for held in self._held.values()), default=0)

    def update(self, learning_rate: float) -> None:
        self.begin_step()
        for weight in self._held:
            if weight.grad is not None:
                self.move(weight, weight.grad, learning_rate)

    @torch.no_grad()
    def move(self, weight: torch.Tensor, gradient: torch.Tensor, learning_rate: float, factor: float = 1.0) -> None:
        held = self._held[weight]
        layout = held.layout
        rows = weight.numel() // layout.columns
        if held.moments is None:
            held.moments = (
                {name: torch.zeros(weight.shape, dtype=torch.float32) for name in ADAMW_NAMES}
                if layout is VECTOR
                else Moments8bit.zeros(rows, layout)
            )
        held.updates += 1
        values, gradients = (each.detach().view(rows, layout.columns) for each in (weight, gradient))
        most = NUMEL_AT_ONCE * torch.get_num_threads()
        for place in self._bits.stretches(held.name, self._steps, held.first_row, rows, layout.width, most):
            part, moments = slice(place.begin, place.end), held.moments
            if isinstance(moments, Moments8bit):
                moved, piece, first, second = self._room(place.end - place.begin, layout.width)
                moments.read(place.begin, place.end, first, second, work=piece)
                fill(moved, values[part], layout.columns)
                fill(piece, gradients[part], layout.columns)
                self._step(held, moved, piece, first, second, learning_rate, factor)
                moments.write(place.begin, place.end, first, second, place.uniform, work=piece)
                write_rounded(values[part], moved, place.bits.view(moved.shape))
            else:  # as one row, filled up to whole vectors of instructions
                columns = place.end - place.begin
                room = self._room(1, -(-columns // LANES) * LANES)
                own = [values[part], gradients[part], *(moments[name].view(rows, 1)[part] for name in ADAMW_NAMES)]
                for wide, each in zip(room, own, strict=True):
                    fill(wide, each.view(1, -1), columns)
                moved, piece, first, second = room
                self._step(held, moved, piece, first, second, learning_rate, factor)
                for wide, each in zip(room[2:], own[2:], strict=True):
                    each.view(1, -1).copy_(wide[:, :columns])
                write_rounded(values[part].view(1, -1), room[0], place.bits.view(1, -1))

    def _room(self, rows: int, width: int) -> torch.Tensor:
        """For a weight, its gradient and two moments; the same memory for every piece."""
        numel = 4 * rows * width
        if self._work.numel() < numel:
            self._work = torch.empty(numel)
        return self._work[:numel].view(4, rows, width)

    def _step(
        self,
        held: _Held,
        moved: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        learning_rate: float,
        factor: float,
    ) -> None:
        """AdamW, in fp32."""
        if factor != 1.0:
            gradient.mul_(factor)
        settings = self._settings
        torch._fused_adamw_(
            [moved],
            [gradient],
            [first],
            [second],
            [],
            [torch.tensor(float(held.updates))],
            lr=learning_rate,
            beta1=settings.adam_betas[0],
            beta2=settings.adam_betas[1],
            weight_decay=held.weight_decay,
            eps=settings.adam_epsilon,
            amsgrad=False,
            maximize=False,
        )

    def state_of(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        held = self._held.get(weight)
        if held is None or held.moments is None:
            return {}, 0
        moments = held.moments
        named = moments.named(weight.shape) if isinstance(moments, Moments8bit) else dict(moments)
        return named, held.updates

    def restore(self, weight: torch.Tensor, state: Mapping[str, torch.Tensor], updates: int) -> None:
        """What AdamW held is converted, one weight at a time."""
        if not state:
            return
        held = self._held[weight]
        held.updates = updates
        if held.layout is VECTOR:
            require_state_names(state, ADAMW_NAMES)
            held.moments = {name: state[name] for name in ADAMW_NAMES}
        elif sorted(state) == sorted(ADAMW_NAMES):
            held.moments = quantised(state, held.layout)
        else:
            require_state_names(state, STATE_NAMES)
            held.moments = Moments8bit.from_named(state, held.layout)


def layout_of(shape: Sequence[int]) -> RowLayout:
    return VECTOR if len(shape) < 2 else RowLayout.of(shape)


def write_rounded(values: torch.Tensor, moved: torch.Tensor, bits: torch.Tensor) -> None:
    """fp32 into rows of a weight; into bf16, the upper half of fp32, with as much added to the lower as chance gives:
    in the mean nothing is lost. What is given is used up."""
    columns = values.shape[1]
    if values.dtype == torch.float32:
        values.copy_(cut(moved, columns))
        return
    words = cut(moved.view(torch.int32), bits.shape[1])
    words.add_(bits).bitwise_right_shift_(16)
    values.view(torch.int16).copy_(cut(words, columns))
