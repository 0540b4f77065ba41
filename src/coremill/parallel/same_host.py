"""FSDP2's collectives for ranks that all run on one host: through memory they share, nothing on the wire.

FSDP2 asks where to lay out what it exchanges. Given shared memory, it writes a rank's part of the weights where all
others read it, and copies the whole out from there: the collective itself moves no byte. Gradients are laid out in the
same way, in the dtype that backward made; each rank adds up its row of all ranks' layouts in fp32 and in rank order.

All of it is done by a rank's own compute threads: there are no others to take the cores from them.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from coremill.parallel.collectives import Deferred
from coremill.parallel.exchange import Kind, WireMeter
from coremill.parallel.heap import Backward
from coremill.parallel.neighbours import Neighbours, Slot

# Reductions announced and not yet summed: by the time the next layer has been laid out, all ranks have this one's.
MAX_UNSUMMED = 1
# Summed at once: what is added to stays in the caches.
NUMEL_AT_ONCE = 2**18
# Of a large embedding or head so much is read before its pages leave this rank's resident memory again.
LARGE_PIECE_NUMEL = 2**24


class _Timed:
    """Waits for neighbours, on the meter."""

    def __init__(self, kind: Kind, neighbours: Neighbours, meter: WireMeter) -> None:
        self._kind = kind
        self._neighbours = neighbours
        self._meter = meter
        self.lasting_up_to_bytes = 2**62  # larger ones are needed once a step: their pages go back

    def _take(self, nbytes: int, own: slice) -> Slot:
        is_lasting = nbytes <= self.lasting_up_to_bytes
        if not is_lasting:
            self._neighbours.unmap_others()
        self._neighbours.waited_seconds = 0.0
        slot = self._neighbours.take(self._kind, nbytes, own, is_lasting=is_lasting)
        self._meter.add(self._kind, exposed=self._neighbours.waited_seconds)
        return slot

    def _wait_for(self, announcement: int, slot: Slot, began: float, read_bytes: int) -> None:
        self._neighbours.waited_seconds = 0.0
        told = self._neighbours.wait_for(announcement, slot)
        self._meter.add(
            self._kind,
            shared=read_bytes,
            seconds=max(0.0, told - began),
            exposed=self._neighbours.waited_seconds,
        )


class MemoryGather(_Timed):
    """All-gather for FSDP2: every rank's part is written in place, once for the whole host."""

    def __init__(self, neighbours: Neighbours, meter: WireMeter) -> None:
        super().__init__("gather", neighbours, meter)
        self._lent: dict[int, Slot] = {}  # by address
        self._dropped: deque[Slot] = deque()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where FSDP2 lays out this rank's part and reads the others'. The slot is free when it drops the tensor."""
        self.release_dropped()
        numel = prod(size)
        if not numel:
            return torch.empty(*size, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize
        part = nbytes // self._neighbours.size
        slot = self._take(nbytes, slice(self._neighbours.rank * part, (self._neighbours.rank + 1) * part))
        view = memoryview(slot.map)[:nbytes]
        # Only noted: at the moment a tensor goes, anything may be half done.
        weakref.finalize(view, self._dropped.append, slot).atexit = False
        whole = torch.frombuffer(view, dtype=dtype)
        self._lent[whole.data_ptr()] = slot
        return whole.view(*size)

    def release_dropped(self) -> None:
        """Tell the others what is no longer read here."""
        while self._dropped:
            self._neighbours.release(self._kind, self._dropped.popleft())

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        if not output_tensor.numel():
            return Deferred(lambda: None)
        slot = self._lent.pop(output_tensor.data_ptr())
        began = time.monotonic()
        announcement = self._neighbours.announce(slot)
        read_bytes = slot.nbytes - slot.nbytes // self._neighbours.size
        return Deferred(lambda: self._wait_for(announcement, slot, began, read_bytes))


class MemoryScatterSum(_Timed):
    """Reduce-scatter for FSDP2: each rank sums its row of all ranks' layouts; results are in place after `flush`."""

    def __init__(self, neighbours: Neighbours, meter: WireMeter) -> None:
        super().__init__("reduce_scatter", neighbours, meter)
        self._laid: tuple[Slot, torch.Tensor] | None = None  # a slot and all ranks' layouts in it
        self._unsummed: deque[Callable[[], None]] = deque()
        self._heap = Backward()
        self.look: Callable[[torch.Tensor], None] | None = None  # shown what this rank puts in

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where FSDP2 lays gradients out; asked again, where it wants its share of the sum, which is fp32."""
        numel = prod(size)
        if self._laid is not None:
            return torch.empty(numel, dtype=torch.float32, device=device)
        stride = -(-max(1, numel) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        mine, ranks = self._neighbours.rank, self._neighbours.size
        self._heap.lays_out(stride)
        slot = self._take(ranks * stride, slice(mine * stride, (mine + 1) * stride))
        layouts = torch.frombuffer(slot.map, dtype=dtype, count=ranks * stride // dtype.itemsize).view(ranks, -1)
        self._laid = slot, layouts[:, :numel]
        return layouts[mine, :numel]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> None:
        assert self._laid is not None
        (slot, layouts), self._laid = self._laid, None
        if self.look is not None:
            self.look(input_tensor)
        began = time.monotonic()
        announcement = self._neighbours.announce(slot)
        if not slot.is_lasting:
            slot.unmap_pages()
        mine, ranks = self._neighbours.rank, self._neighbours.size
        columns = output_tensor.numel()
        rows = layouts[:, mine * columns : (mine + 1) * columns]

        def finish() -> None:
            read_bytes = (ranks - 1) * columns * layouts.element_size()
            self._wait_for(announcement, slot, began, read_bytes)
            piece = columns if slot.is_lasting else LARGE_PIECE_NUMEL // ranks
            for begin in range(0, columns, max(1, piece)):
                sum_in_order([row[begin : begin + piece] for row in rows], output_tensor[begin : begin + piece])
                if not slot.is_lasting:
                    slot.unmap_pages()
            self._neighbours.release(self._kind, slot)

        self._unsummed.append(finish)
        # A large one at once: its layout takes too much memory to wait for the next.
        while len(self._unsummed) > (MAX_UNSUMMED if slot.is_lasting else 0):
            self._unsummed.popleft()()

    def flush(self) -> None:
        """Sum what is left; afterwards the gradients are whole."""
        self._heap.ended()
        while self._unsummed:
            self._unsummed.popleft()()


def sum_in_order(rows: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Add up in fp32, the first row first."""
    for begin in range(0, total.numel(), NUMEL_AT_ONCE):
        piece = total[begin : begin + NUMEL_AT_ONCE]
        piece.copy_(rows[0][begin : begin + NUMEL_AT_ONCE])
        for row in rows[1:]:
            piece.add_(row[begin : begin + NUMEL_AT_ONCE])
