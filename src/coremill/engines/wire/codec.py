"""How gradients are written for the wire: as they are, as bf16, or as sqrt16.

sqrt16 is the square root of a gradient relative to the largest of its block, with the gradient's sign, in 16 bits. The
error of a value v in a block with largest value s is at most sqrt(v * s) / 32767: a largest value keeps 15 bits where
bf16 keeps 8, and one of a four-thousandth of it still 8. Like bf16 it halves the bytes; unlike bf16 it leaves the loss
of fp32 arithmetic where it was (docs/benchmarks.md).

Values go through in chunks that stay in the cache, each operation in place: a pass over memory, not seven. Blocks begin
anew with every run of values that is named and depend neither on chunks nor on threads, so the bits repeat.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from coremill.plan.traffic import SCALE_BLOCK, GradientForm

_LARGEST = 32767
# Values of a chunk for each thread: 256 KiB in fp32, and torch gives each thread at least 32 Ki.
_CHUNK_PER_THREAD = 64 * SCALE_BLOCK
# Below this no scale is told from zero; a block of zeros then needs no case of its own.
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class _Chunk(NamedTuple):
    """Blocks that are worked on at once."""

    part: slice  # of the values
    blocks: slice
    width: int  # of each block


class Codec(ABC):
    """A form of fp32 values on the wire.

    Values and a wire are contiguous, in one dimension; a wire may be longer than its values need. `runs` are the
    lengths of what lies one after the other in the values.
    """

    dtype: torch.dtype  # of wire buffers

    @abstractmethod
    def length(self, runs: Sequence[int]) -> int:
        """Elements that these runs take on the wire."""

    @abstractmethod
    def encode(self, values: torch.Tensor, runs: Sequence[int], wire: torch.Tensor) -> None:
        """Write values."""

    @abstractmethod
    def _read(self, wire: torch.Tensor, runs: Sequence[int], chunk: _Chunk, into: torch.Tensor) -> torch.Tensor:
        """Write a chunk's values to this place, which is returned."""

    def _add(
        self, wire: torch.Tensor, runs: Sequence[int], chunk: _Chunk, into: torch.Tensor, room: torch.Tensor
    ) -> None:
        into += self._read(wire, runs, chunk, room[: into.numel()])

    def decode(self, wire: torch.Tensor, runs: Sequence[int], values: torch.Tensor) -> None:
        """Read them."""
        for chunk in _chunks(runs):
            self._read(wire, runs, chunk, values[chunk.part])

    def add(self, before: torch.Tensor, after: torch.Tensor, runs: Sequence[int], total: torch.Tensor) -> None:
        """Add what other ranks sent to this rank's own, in fp32 and in rank order: rows of lower ranks, of higher.

        Each chunk is read once and written once; torch's own sum of bf16 rows takes ten times as long."""
        lower, higher = list(before), list(after)
        if len(lower) == 1:  # its sum with this rank's own is the same either way
            lower, higher = [], lower + higher
        sums, room = _scratch(total), _scratch(total)
        for chunk in _chunks(runs):
            into = total[chunk.part]
            if lower:
                earlier = self._read(lower[0], runs, chunk, sums[: into.numel()])
                for wire in lower[1:]:
                    self._add(wire, runs, chunk, earlier, room)
                into += earlier
            for wire in higher:
                self._add(wire, runs, chunk, into, room)

    def sum(self, wires: Sequence[torch.Tensor], runs: Sequence[int], total: torch.Tensor) -> None:
        """Of what all ranks have, as it is on the wire: in fp32 and in order."""
        room = _scratch(total)
        for chunk in _chunks(runs):
            into = self._read(wires[0], runs, chunk, total[chunk.part])
            for wire in wires[1:]:
                self._add(wire, runs, chunk, into, room)


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


class Plain(Codec):
    """Values in a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def length(self, runs: Sequence[int]) -> int:
        return sum(runs)

    def encode(self, values: torch.Tensor, runs: Sequence[int], wire: torch.Tensor) -> None:
        wire[: values.numel()].copy_(values)

    def _read(self, wire: torch.Tensor, runs: Sequence[int], chunk: _Chunk, into: torch.Tensor) -> torch.Tensor:
        return into.copy_(wire[chunk.part])

    def _add(
        self, wire: torch.Tensor, runs: Sequence[int], chunk: _Chunk, into: torch.Tensor, room: torch.Tensor
    ) -> None:
        into += wire[chunk.part]

    def decode(self, wire: torch.Tensor, runs: Sequence[int], values: torch.Tensor) -> None:
        values.copy_(wire[: values.numel()])


class Sqrt16(Codec):
    """The fp32 scale of each block; behind them, in the same buffer, 16-bit square roots."""

    dtype = torch.int16

    def length(self, runs: Sequence[int]) -> int:
        """Two elements a scale, one a root, rounded up: the next row must lie where an fp32 number may."""
        return 2 * _blocks(runs) + (sum(runs) + 1) // 2 * 2

    def encode(self, values: torch.Tensor, runs: Sequence[int], wire: torch.Tensor) -> None:
        """A block with a number that is not finite gets a scale that is not: none of its numbers arrives finite."""
        scales, roots = _parts(wire, runs)
        scratch = _scratch(values)
        for part, blocks, width in _chunks(runs):
            given = values[part].view(-1, width)
            work = torch.abs(given, out=scratch[: given.numel()].view_as(given))
            scale = scales[blocks]
            scale.copy_(torch.amax(work, dim=1).clamp_(min=_LEAST_SCALE))
            work.sqrt_().mul_(scale.sqrt().reciprocal_().mul_(_LARGEST).unsqueeze(1)).round_().copysign_(given)
            roots[part].view_as(work).copy_(work)

    def _read(self, wire: torch.Tensor, runs: Sequence[int], chunk: _Chunk, into: torch.Tensor) -> torch.Tensor:
        """Roots keep the sign of their value."""
        scales, roots = _parts(wire, runs)
        values = into.copy_(roots[chunk.part]).view(-1, chunk.width)
        values.mul_(values.abs()).mul_(scales[chunk.blocks].div(_LARGEST**2).unsqueeze(1))
        return into


def _parts(wire: torch.Tensor, runs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and square roots of a wire."""
    blocks = _blocks(runs)
    return wire[: 2 * blocks].view(torch.float32), wire[2 * blocks :]


def _blocks(runs: Sequence[int]) -> int:
    return sum(-(-run // SCALE_BLOCK) for run in runs)


def _chunks(runs: Sequence[int]) -> Iterator[_Chunk]:
    """The short last block of a run comes alone."""
    most = max(1, _CHUNK_PER_THREAD * torch.get_num_threads() // SCALE_BLOCK)
    begin = block = 0
    for run in runs:
        end = begin + run
        while begin < end:
            width = min(SCALE_BLOCK, end - begin)
            count = min(most, (end - begin) // width)
            yield _Chunk(slice(begin, begin + count * width), slice(block, block + count), width)
            begin += count * width
            block += count


def _scratch(values: torch.Tensor) -> torch.Tensor:
    """Room for one chunk."""
    return torch.empty(min(values.numel(), _CHUNK_PER_THREAD * torch.get_num_threads()), dtype=torch.float32)
