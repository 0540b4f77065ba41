"""How gradients are written for the wire: as they are, as bf16, or as sqrt16.

sqrt16 is the square root of a gradient relative to the largest of its block, with the gradient's sign, in 16 bits. The
error of a value v in a block with largest value s is at most sqrt(v * s) / 32767: a largest value keeps 15 bits where
bf16 keeps 8, and one of a four-thousandth of it still 8. Like bf16 it halves the bytes; unlike bf16 it leaves the loss
of fp32 arithmetic where it was (docs/benchmarks.md).

Values go through in chunks that stay in the cache, each operation in place: a pass over memory, not seven. Blocks begin
anew with every run of values that is named and depend neither on chunks nor on threads, so the bits repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from coremill.plan.wire import SCALE_BLOCK, GradientForm

_LARGEST = 32767
# Values of a chunk for each thread: 256 KiB in fp32, and torch gives each thread at least 32 Ki.
_CHUNK_PER_THREAD = 64 * SCALE_BLOCK
# Below this no scale is told from zero; a block of zeros then needs no case of its own.
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class Codec(Protocol):
    """A form of fp32 values on the wire.

    Values and a wire are contiguous, in one dimension; a wire may be longer than its values need. `runs` are the
    lengths of what lies one after the other in the values.
    """

    dtype: torch.dtype  # of wire buffers

    def length(self, runs: Sequence[int]) -> int:
        """Elements that these runs take on the wire."""

    def encode(self, values: torch.Tensor, runs: Sequence[int], wire: torch.Tensor) -> None:
        """Write values."""

    def decode(self, wire: torch.Tensor, runs: Sequence[int], values: torch.Tensor) -> None:
        """Read them."""

    def add(self, before: torch.Tensor, after: torch.Tensor, runs: Sequence[int], total: torch.Tensor) -> None:
        """Add what other ranks sent to this rank's own, in fp32 and in rank order: rows of lower ranks, of higher."""

    def sum(self, wires: Sequence[torch.Tensor], runs: Sequence[int], total: torch.Tensor) -> None:
        """Of what all ranks have, as it is on the wire: in fp32 and in order."""


def codec_of(form: GradientForm) -> Codec:
    return Sqrt16() if form == "sqrt16" else Plain(torch.float32 if form == "fp32" else torch.bfloat16)


def shares_of(values: Sequence[torch.Tensor], ranks: int) -> list[list[torch.Tensor]]:
    """Pieces of these, in order, in as many nearly equal shares as there are ranks; no block is cut."""
    whole = sum(each.numel() for each in values)
    shares: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    rank = offset = 0
    for each in values:
        begin, numel = 0, each.numel()
        while rank < ranks - 1 and whole * (rank + 1) // ranks < offset + numel:
            end = max(begin, (whole * (rank + 1) // ranks - offset) // SCALE_BLOCK * SCALE_BLOCK)
            shares[rank].append(each[begin:end])
            begin, rank = end, rank + 1
        shares[rank].append(each[begin:])
        offset += numel
    return [[piece for piece in share if piece.numel()] for share in shares]


class Plain:
    """Values in a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def length(self, runs: Sequence[int]) -> int:
        return sum(runs)

    def encode(self, values: torch.Tensor, runs: Sequence[int], wire: torch.Tensor) -> None:
        wire[: values.numel()].copy_(values)

    def decode(self, wire: torch.Tensor, runs: Sequence[int], values: torch.Tensor) -> None:
        values.copy_(wire[: values.numel()])

    def add(self, before: torch.Tensor, after: torch.Tensor, runs: Sequence[int], total: torch.Tensor) -> None:
        """Chunk by chunk; torch's own sum of bf16 rows takes ten times as long."""
        scratch = _scratch(total)
        lower, higher = list(before), list(after)
        if len(lower) == 1:  # its sum with this rank's own is the same either way
            lower, higher = [], lower + higher
        for begin, rows, width in _chunks([total.numel()]):
            part = slice(begin, begin + rows * width)
            into = total[part]
            if lower:
                earlier = scratch[: into.numel()].copy_(lower[0][part])
                for wire in lower[1:]:
                    earlier += wire[part]
                into += earlier
            for wire in higher:
                into += wire[part]

    def sum(self, wires: Sequence[torch.Tensor], runs: Sequence[int], total: torch.Tensor) -> None:
        for begin, rows, width in _chunks([total.numel()]):
            part = slice(begin, begin + rows * width)
            into = total[part].copy_(wires[0][part])
            for wire in wires[1:]:
                into += wire[part]


class Sqrt16:
    """The fp32 scale of each block; behind them, in the same buffer, 16-bit square roots."""

    dtype = torch.int16

    def length(self, runs: Sequence[int]) -> int:
        """Two elements a scale, one a root, rounded up: the next row must lie where an fp32 number may."""
        return 2 * _blocks(runs) + (sum(runs) + 1) // 2 * 2

    def encode(self, values: torch.Tensor, runs: Sequence[int], wire: torch.Tensor) -> None:
        """A block with a number that is not finite gets a scale that is not: none of its numbers arrives finite."""
        scales, roots = _parts(wire, runs)
        scratch, block = _scratch(values), 0
        for begin, rows, width in _chunks(runs):
            end = begin + rows * width
            given = values[begin:end].view(rows, width)
            work = torch.abs(given, out=scratch[: rows * width].view(rows, width))
            scale = scales[block : block + rows]
            scale.copy_(torch.amax(work, dim=1).clamp_(min=_LEAST_SCALE))
            work.sqrt_().mul_(scale.sqrt().reciprocal_().mul_(_LARGEST).unsqueeze(1)).round_().copysign_(given)
            roots[begin:end].view(rows, width).copy_(work)
            block += rows

    def decode(self, wire: torch.Tensor, runs: Sequence[int], values: torch.Tensor) -> None:
        scales, roots = _parts(wire, runs)
        block = 0
        for begin, rows, width in _chunks(runs):
            part = slice(begin, begin + rows * width)
            _square(roots[part], scales[block : block + rows], values[part].view(rows, width))
            block += rows

    def add(self, before: torch.Tensor, after: torch.Tensor, runs: Sequence[int], total: torch.Tensor) -> None:
        """Chunk by chunk: each is read once and written once."""
        lower, higher = [_parts(wire, runs) for wire in before], [_parts(wire, runs) for wire in after]
        sums, values, block = _scratch(total), _scratch(total), 0
        for begin, rows, width in _chunks(runs):
            part, blocks = slice(begin, begin + rows * width), slice(block, block + rows)
            into, work = total[part].view(rows, width), values[: rows * width].view(rows, width)
            if lower:
                (scales, roots), *others = lower
                earlier = _square(roots[part], scales[blocks], sums[: rows * width].view(rows, width))
                for scales, roots in others:
                    earlier += _square(roots[part], scales[blocks], work)
                into += earlier
            for scales, roots in higher:
                into += _square(roots[part], scales[blocks], work)
            block += rows

    def sum(self, wires: Sequence[torch.Tensor], runs: Sequence[int], total: torch.Tensor) -> None:
        first, *others = [_parts(wire, runs) for wire in wires]
        values, block = _scratch(total), 0
        for begin, rows, width in _chunks(runs):
            part, blocks = slice(begin, begin + rows * width), slice(block, block + rows)
            into, work = total[part].view(rows, width), values[: rows * width].view(rows, width)
            _square(first[1][part], first[0][blocks], into)
            for scales, roots in others:
                into += _square(roots[part], scales[blocks], work)
            block += rows


def _square(roots: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Values of blocks from their square roots, which keep the sign."""
    out.copy_(roots.view_as(out))
    return out.mul_(out.abs()).mul_(scales.div(_LARGEST**2).unsqueeze(1))


def _parts(wire: torch.Tensor, runs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and square roots of a wire."""
    blocks = _blocks(runs)
    return wire[: 2 * blocks].view(torch.float32), wire[2 * blocks :]


def _blocks(runs: Sequence[int]) -> int:
    return sum(-(-run // SCALE_BLOCK) for run in runs)


def _chunks(runs: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where a chunk begins, its blocks, and their width; the short last block of a run comes alone."""
    most = max(1, _CHUNK_PER_THREAD * torch.get_num_threads() // SCALE_BLOCK)
    offset = 0
    for run in runs:
        whole = run // SCALE_BLOCK
        for block in range(0, whole, most):
            yield offset + block * SCALE_BLOCK, min(most, whole - block), SCALE_BLOCK
        if run % SCALE_BLOCK:
            yield offset + whole * SCALE_BLOCK, 1, run % SCALE_BLOCK
        offset += run


def _scratch(values: torch.Tensor) -> torch.Tensor:
    """Room for one chunk."""
    return torch.empty(min(values.numel(), _CHUNK_PER_THREAD * torch.get_num_threads()), dtype=torch.float32)
