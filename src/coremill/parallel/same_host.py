"""FSDP2's collectives for ranks that all run on one host: through memory they share, nothing on the wire.

FSDP2 asks where to lay out what it exchanges. Given shared memory, it writes a rank's part of the weights where all
others read it, and copies the whole out from there: the collective itself moves no byte. Gradients are laid out in the
same way, in the dtype that backward made; each rank adds up its row of all ranks' layouts in fp32 and in rank order.

All of it is done by a rank's own compute threads: there are no others to take the cores from them.
"""

from __future__ import annotations

import contextlib
import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from coremill.parallel.collectives import Deferred
from coremill.parallel.exchange import Kind, WireMeter
from coremill.parallel.heap import Backward
from coremill.parallel.neighbours import IN_TURN, Neighbours, Slot
from coremill.plan.wire import PASSED_AT_ONCE_NUMEL

# Reductions announced and not yet summed: by the time the next layer has been laid out, all ranks have this one's.
MAX_UNSUMMED = 1
# Summed at once: what is added to stays in the caches.
NUMEL_AT_ONCE = 2**18


class _Timed:
    """Takes slots and waits for neighbours, on the meter."""

    def __init__(self, kind: Kind, neighbours: Neighbours, meter: WireMeter) -> None:
        self._kind = kind
        self._neighbours = neighbours
        self._meter = meter
        # Larger ones are needed once a step: made anew in shared memory, a page at a time, they cost more than a copy.
        self.shared_up_to_bytes = 2**62

    def _take(self, nbytes: int, own: slice) -> Slot:
        self._neighbours.waited_seconds = 0.0
        slot = self._neighbours.take(self._kind, nbytes, own)
        self._meter.add(self._kind, exposed=self._neighbours.waited_seconds)
        return slot

    def _announce(self, slot: Slot, *, read_bytes: int) -> Callable[[], None]:
        """This rank's part is written; what is returned waits until all are, of which so much is read."""
        began = time.monotonic()
        announcement = self._neighbours.announce(slot)

        def wait() -> None:
            self._neighbours.waited_seconds = 0.0
            told = self._neighbours.wait_for(announcement, slot)
            self._meter.add(
                self._kind,
                shared=read_bytes,
                seconds=max(0.0, told - began),
                exposed=self._neighbours.waited_seconds,
            )

        return wait

    def _pass_on(self, parts: Sequence[torch.Tensor], read: Callable[[int, torch.Tensor], None]) -> None:
        """Show all ranks these parts, all equally long, a piece of each at a time.

        `read` is given where in them a piece begins, and by rank and part what all ranks show there."""
        parts_per_rank, columns, itemsize = len(parts), parts[0].numel(), parts[0].element_size()
        ranks, mine = self._neighbours.size, self._neighbours.rank
        at_once = max(1, PASSED_AT_ONCE_NUMEL // parts_per_rank)
        stride = -(-at_once * parts_per_rank * itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        shown: deque[Callable[[], None]] = deque()
        for begin in range(0, columns, at_once):
            numel = min(at_once, columns - begin)
            slot = self._take(ranks * stride, slice(mine * stride, (mine + 1) * stride))
            whole = torch.frombuffer(slot.map, dtype=parts[0].dtype, count=ranks * stride // itemsize).view(ranks, -1)
            pieces = whole[:, : parts_per_rank * numel].view(ranks, parts_per_rank, numel)
            for part, place in zip(parts, pieces[mine], strict=True):
                place.copy_(part[begin : begin + numel])
            arrival = self._announce(slot, read_bytes=(ranks - 1) * numel * itemsize)
            shown.append(partial(self._take_in, arrival, slot, partial(read, begin, pieces)))
            while len(shown) >= IN_TURN:
                shown.popleft()()
        while shown:
            shown.popleft()()

    def _take_in(self, arrival: Callable[[], None], slot: Slot, read: Callable[[], None]) -> None:
        arrival()
        read()
        self._neighbours.release(self._kind, slot)


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
        nbytes = numel * dtype.itemsize
        if not numel:
            return torch.empty(*size, dtype=dtype, device=device)
        if nbytes > self.shared_up_to_bytes:
            return _passing(numel, dtype).view(*size)
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
        slot = self._lent.pop(output_tensor.data_ptr(), None)
        if slot is None:
            return Deferred(lambda: self._gather_large(output_tensor, input_tensor))
        return Deferred(self._announce(slot, read_bytes=slot.nbytes - slot.nbytes // self._neighbours.size))

    def _gather_large(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        mine, parts = self._neighbours.rank, whole.view(self._neighbours.size, -1)

        def read(begin: int, pieces: torch.Tensor) -> None:
            for rank, (piece,) in enumerate(pieces):
                if rank != mine:
                    parts[rank, begin : begin + piece.numel()].copy_(piece)

        self._pass_on([part], read)


class MemoryScatterSum(_Timed):
    """Reduce-scatter for FSDP2: each rank sums its row of all ranks' layouts; results are in place after `flush`."""

    def __init__(self, neighbours: Neighbours, meter: WireMeter) -> None:
        super().__init__("reduce_scatter", neighbours, meter)
        self._is_laid_out = False
        self._laid: tuple[Slot, torch.Tensor] | None = None  # a slot and all ranks' layouts in it; None: a large one
        self._unsummed: deque[Callable[[], None]] = deque()
        self._heap = Backward()
        self.look: Callable[[torch.Tensor], None] | None = None  # shown what this rank puts in

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where FSDP2 lays gradients out; asked again, where it wants its share of the sum, which is fp32."""
        numel = prod(size)
        self._is_laid_out = not self._is_laid_out
        if not self._is_laid_out:
            return torch.empty(numel, dtype=torch.float32, device=device)
        stride = -(-max(1, numel) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        mine, ranks = self._neighbours.rank, self._neighbours.size
        if ranks * stride > self.shared_up_to_bytes:
            # The moment that needs most, in a model with a large table.
            self._neighbours.unmap_others()
            self._heap.lays_out(stride)
            return _passing(numel, dtype)
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
        if self.look is not None:
            self.look(input_tensor)
        if self._laid is None:
            self._sum_large(output_tensor, input_tensor)
            return
        (slot, layouts), self._laid = self._laid, None
        mine, columns = self._neighbours.rank, output_tensor.numel()
        rows = list(layouts[:, mine * columns : (mine + 1) * columns])
        arrival = self._announce(slot, read_bytes=(len(rows) - 1) * columns * layouts.element_size())
        self._unsummed.append(partial(self._take_in, arrival, slot, partial(sum_in_order, rows, output_tensor)))
        while len(self._unsummed) > MAX_UNSUMMED:
            self._unsummed.popleft()()

    def _sum_large(self, total: torch.Tensor, laid_out: torch.Tensor) -> None:
        mine = self._neighbours.rank

        def read(begin: int, pieces: torch.Tensor) -> None:
            rows = list(pieces[:, mine])
            sum_in_order(rows, total[begin : begin + rows[0].numel()])

        self._pass_on(list(laid_out.view(self._neighbours.size, -1)), read)

    def flush(self) -> None:
        """Sum what is left; afterwards the gradients are whole."""
        self._heap.ended()
        while self._unsummed:
            self._unsummed.popleft()()


def _passing(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that goes back to the kernel with the tensor: in the heap it would leave a hole for the rest of a step."""
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)


def sum_in_order(rows: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Add up in fp32, the first row first."""
    for begin in range(0, total.numel(), NUMEL_AT_ONCE):
        piece = total[begin : begin + NUMEL_AT_ONCE]
        piece.copy_(rows[0][begin : begin + NUMEL_AT_ONCE])
        for row in rows[1:]:
            piece.add_(row[begin : begin + NUMEL_AT_ONCE])
