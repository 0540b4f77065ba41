"""Reads rows of tensors out of safetensors files by byte range, casting on the way in.

Plain reads into a small reused buffer, never a memory map: mapped pages count as memory of the process (a rank would
seem to hold every page it touched), and page faults over a network file system are slow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from coremill.errors import InputError
from coremill.plan.headers import TensorHeader
from coremill.plan.memory import LOAD_SLICE_BYTES
from coremill.world.heartbeat import HEARTBEAT

# Large enough to stream at disk speed, small beside any slice.
PIECE_BYTES = 8 * 2**20

FLOATING = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
WHOLE_NUMBERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorReader:
    """Open files of one model folder, and a count of the bytes read from them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.bytes_read = 0

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read_rows(self, header: TensorHeader, start: int, stop: int, target: torch.Tensor) -> None:
        """Rows [start, stop) of a tensor into contiguous memory, in the dtype of that memory."""
        flat = target.view(-1)
        if dtype_of(header) == target.dtype:
            position, _ = _byte_range(header, start, stop)
            self._read_into(header, position, flat.view(torch.uint8))
            return
        for offset, values in self._pieces(header, start, stop):
            flat[offset : offset + values.numel()].copy_(values)

    def rows_equal(self, header: TensorHeader, start: int, stop: int, target: torch.Tensor) -> bool:
        """Whether rows [start, stop) of a tensor are what this memory already holds."""
        flat = target.view(-1)
        return all(
            torch.equal(values.to(flat.dtype), flat[offset : offset + values.numel()])
            for offset, values in self._pieces(header, start, stop)
        )

    def read_whole(self, header: TensorHeader) -> torch.Tensor:
        """A whole tensor in the dtype it is stored in."""
        tensor = torch.empty(header.shape, dtype=dtype_of(header))
        self.read_rows(header, 0, header.shape[0] if header.shape else 1, tensor)
        return tensor

    def _pieces(self, header: TensorHeader, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements of these rows, piece by piece in a reused buffer, each with the element it starts at."""
        if not self._buffer.numel():
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        dtype = dtype_of(header)
        first, end = _byte_range(header, start, stop)
        for position in range(first, end, PIECE_BYTES):
            piece = self._buffer[: min(PIECE_BYTES, end - position)]
            self._read_into(header, position, piece)
            yield (position - first) // dtype.itemsize, piece.view(dtype)

    def _read_into(self, header: TensorHeader, position: int, target: torch.Tensor) -> None:
        """Fill a byte tensor from a file; a read may return less than asked for."""
        view = target.numpy().data
        descriptor = self._descriptor(header.file)
        done = 0
        while done < len(view):
            # Each part leaves a mark that the rank gets on.
            count = os.preadv(descriptor, [view[done : done + LOAD_SLICE_BYTES]], position + done)
            if count == 0:
                what = f"{header.file} ended while tensor {header.name} was read"
                raise InputError(what, where=str(self._folder / header.file), do="download or copy the file again")
            done += count
            HEARTBEAT.advance(count)
        self.bytes_read += done

    def _descriptor(self, file: str) -> int:
        if file not in self._files:
            self._files[file] = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[file]


def bytes_of_rows(header: TensorHeader, start: int, stop: int) -> int:
    """How many bytes rows [start, stop) have in the file."""
    first, end = _byte_range(header, start, stop)
    return end - first


def _byte_range(header: TensorHeader, start: int, stop: int) -> tuple[int, int]:
    """Where rows [start, stop) lie in the file: one range, since tensors are stored row by row."""
    row_bytes = header.bytes // header.shape[0] if header.shape and header.shape[0] else header.bytes
    return header.start + start * row_bytes, header.start + stop * row_bytes


def dtype_of(header: TensorHeader) -> torch.dtype:
    dtype = FLOATING.get(header.dtype) or WHOLE_NUMBERS.get(header.dtype)
    if dtype is None:
        raise quantised(header)
    return dtype


def quantised(header: TensorHeader) -> InputError:
    """The refusal of a tensor that is stored in fewer bits than can be trained."""
    return InputError(
        f"tensor {header.name} is stored as {header.dtype}",
        where=header.file,
        why="quantised weights cannot be trained",
        do="use the model they were made from",
    )
