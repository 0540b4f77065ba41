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
from coremill.engines.optimizers.moments_8bit import ADAMW_NAMES, STATE_NAMES, Moments8bit, RowLayout, fill, quantised
from coremill.engines.optimizers.place_bits import PlaceBits, Stretch
from coremill.model.slices import RowSlice

# Of a weight at once, for each thread: five such pieces in fp32 stay in a core's second cache.
NUMEL_AT_ONCE = 2**17
VECTOR = RowLayout(1, 1, 1)  # its rows are its elements


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
                first_row=pieces[weight].start,
                weight_decay=0.0 if name in left_out else settings.weight_decay,
                layout=layout_of(pieces[weight].shape),
            )
            for name, weight in trainable
        }
        shapes = [piece.shape for piece in slices if piece.local.requires_grad]
        widths = [layout_of(shape).width for shape in shapes]
        numels = [width * (shape[0] if shape else 1) for width, shape in zip(widths, shapes, strict=True)]
        largest, widest = max(numels, default=1), max(widths, default=1)
        self._bits = PlaceBits(settings.seed, largest_numel=largest, widest_row=widest)
        self._work = torch.empty(0)

    def update(self, learning_rate: float) -> None:
        for weight in self._held:
            if weight.grad is not None:
                self.move(weight, weight.grad, learning_rate)

    @torch.no_grad()
    def move(self, weight: torch.Tensor, gradient: torch.Tensor, learning_rate: float, factor: float = 1.0) -> None:
        held = self._held[weight]
        layout, settings = held.layout, self._settings
        rows = weight.numel() // layout.columns
        values, gradients = (each.detach().view(rows, layout.columns) for each in (weight, gradient))
        if held.moments is None:
            held.moments = (
                {name: torch.zeros(weight.shape, dtype=torch.float32) for name in ADAMW_NAMES}
                if layout is VECTOR
                else Moments8bit.zeros(rows, layout)
            )
        held.updates += 1
        step = torch.tensor(float(held.updates))
        most = NUMEL_AT_ONCE * torch.get_num_threads()
        for place in self._bits.stretches(held.name, held.updates, held.first_row, rows, layout.width, most):
            piece, moved, first, second = self._pieces(place, layout)
            fill(piece, gradients[place.begin : place.end], layout.columns)
            if factor != 1.0:
                piece.mul_(factor)
            in_place = weight.dtype == torch.float32 and layout.columns == layout.width
            if in_place:
                moved = values[place.begin : place.end]
            else:
                fill(moved, values[place.begin : place.end], layout.columns)
            if isinstance(held.moments, Moments8bit):
                held.moments.read(place.begin, place.end, first, second)
            else:
                first, second = (held.moments[name].view(rows, 1)[place.begin : place.end] for name in ADAMW_NAMES)
            torch._fused_adamw_(
                [moved],
                [piece],
                [first],
                [second],
                [],
                [step],
                lr=learning_rate,
                beta1=settings.adam_betas[0],
                beta2=settings.adam_betas[1],
                weight_decay=held.weight_decay,
                eps=settings.adam_epsilon,
                amsgrad=False,
                maximize=False,
            )
            if isinstance(held.moments, Moments8bit):
                held.moments.write(place.begin, place.end, first, second, place.uniform, work=piece)
            if not in_place:
                write_rounded(values[place.begin : place.end], moved, place.bits)

    def _pieces(self, place: Stretch, layout: RowLayout) -> torch.Tensor:
        """Room for gradient, weight and two moments; the same memory for every piece."""
        numel = (place.end - place.begin) * layout.width
        if self._work.numel() < 4 * numel:
            self._work = torch.empty(4 * numel)
        return self._work[: 4 * numel].view(4, -1, layout.width)

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
    return VECTOR if len(shape) < 2 else RowLayout.of(torch.Size(shape[1:]).numel())


def write_rounded(values: torch.Tensor, moved: torch.Tensor, bits: torch.Tensor) -> None:
    """fp32 into rows of a weight; into bf16, the upper half of fp32, with as much added to the lower as chance gives:
    in the mean nothing is lost. What is given is used up."""
    columns = values.shape[1]
    if values.dtype == torch.float32:
        values.copy_(moved[:, :columns])
        return
    words = moved.view(torch.int32)
    words.add_(bits.view(words.shape)).bitwise_right_shift_(16)
    values.view(torch.int16).copy_(words[:, :columns])
