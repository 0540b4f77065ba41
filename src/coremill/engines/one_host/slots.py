"""What ranks of one host share through memory: weights that lie there once for all, and gradients on their way.

Every rank computes with the same pages of weights: nothing is gathered, nothing copied. Each rounds the rows it holds
into them after an update. A layer's gradients are laid out in the dtype that backward made, and each rank adds up its
rows of all ranks' layouts in fp32 and in rank order; a group larger than a layer, a table, passes in pieces.

All of it is done by a rank's own compute threads: there are no others to take the cores from them.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from coremill.engines.one_host.cost import PASSED_AT_ONCE_NUMEL, SLOTS_IN_TURN
from coremill.engines.one_host.shared_memory import HostPeers, Slot
from coremill.engines.wire.exchange import Kind, WireMeter
from coremill.model.heap import Backward
from coremill.model.slices import rows_of_rank

# Groups announced and not yet summed: by the time the next layer has been laid out, all ranks have this one's.
MAX_UNSUMMED = 1
# Summed at once: what is added to stays in the caches.
NUMEL_AT_ONCE = 2**18
# What vector instructions read at once.
ALIGNED_BYTES = 64


@dataclass(frozen=True, eq=False)
class HostWeight:
    """A parameter: `whole` for all ranks to compute with, `local` the rows that this one answers for: fp32 masters, or
    where there are none the rows of `whole` itself."""

    whole: nn.Parameter
    local: nn.Parameter
    begin: int  # of these rows in the flat whole
    end: int

    @property
    def is_trained(self) -> bool:
        return self.whole.requires_grad


class HostWeights:
    """The model's weights, once for the host; parameters come in groups, one for each layer and end of the model."""

    def __init__(
        self,
        peers: HostPeers,
        meter: WireMeter,
        groups: Sequence[Sequence[nn.Parameter]],
        dtype: torch.dtype,
        *,
        trained_have_masters: bool = True,
        frozen_have_masters: bool = True,
    ) -> None:
        """`..._have_masters`: fp32 rows beside narrower weights, of those that are trained, and of those that are not
        but saved."""
        self._peers = peers
        self._meter = meter
        self._dtype = dtype
        self._has_masters = {True: trained_have_masters, False: frozen_have_masters}  # by whether it is trained
        places, end = [], 0
        for group in groups:
            end = _up(end, mmap.PAGESIZE)
            for parameter in group:
                places.append(end)
                end = _up(end + parameter.numel() * dtype.itemsize, ALIGNED_BYTES)
        self._slot = peers.keep(end)
        place = iter(places)
        self.groups = [[self._lay_out(parameter, next(place)) for parameter in group] for group in groups]
        self._place = {weight: place for weight, place in zip(self.weights, places, strict=True)}
        self._arrival: Callable[[], None] | None = None
        self._is_published = False

    @property
    def weights(self) -> list[HostWeight]:
        return [weight for group in self.groups for weight in group]

    def _lay_out(self, parameter: nn.Parameter, place: int) -> HostWeight:
        shape = parameter.shape
        flat = torch.frombuffer(self._slot.map, dtype=self._dtype, offset=place, count=parameter.numel())
        start, stop = rows_of_rank(shape[0], self._peers.rank, self._peers.size)
        row_numel = parameter.numel() // shape[0]
        local = flat.view(shape)[start:stop]
        if self._dtype != torch.float32 and self._has_masters[parameter.requires_grad]:
            local = torch.empty(local.shape, dtype=torch.float32)
        rows = nn.Parameter(local, requires_grad=parameter.requires_grad)
        if rows.requires_grad and rows.dtype != torch.float32:
            rows.grad_dtype = torch.float32  # sums are, whatever it is computed with
        return HostWeight(
            whole=nn.Parameter(flat.view(shape), requires_grad=parameter.requires_grad),
            local=rows,
            begin=start * row_numel,
            end=stop * row_numel,
        )

    @torch.no_grad()
    def publish(self) -> None:
        """Have all ranks compute with what the rows of this one have become; no rank may be computing.

        Frozen ones are new once."""
        moved = [weight for weight in self.weights if weight.is_trained or not self._is_published]
        self._is_published = True
        for weight in moved:
            if weight.local.dtype != self._dtype:
                weight.whole.view(-1)[weight.begin : weight.end].copy_(weight.local.view(-1))
        own_bytes = sum(weight.end - weight.begin for weight in moved) * self._dtype.itemsize
        whole_bytes = sum(weight.whole.nbytes for weight in moved)
        self._arrival = _announce(self._peers, self._meter, "gather", self._slot, whole_bytes - own_bytes)

    def wait(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival()

    def unmap_others(self, group: Sequence[HostWeight]) -> None:
        """Rows of other ranks out of this one's resident memory: every page is then resident where it is filled."""
        for weight in group:
            place, itemsize = self._place[weight], self._dtype.itemsize
            own = _up(place + weight.end * itemsize, mmap.PAGESIZE)
            self._unmap(place, place + weight.begin * itemsize)
            self._unmap(own, place + weight.whole.nbytes)

    def _unmap(self, begin: int, end: int) -> None:
        """The pages that lie in there whole: one on an edge belongs to two parameters."""
        begin, end = _up(begin, mmap.PAGESIZE), end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._slot.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class HostSums:
    """Gradients of all ranks added up; each rank gets the rows it holds. In place after `flush`."""

    def __init__(self, peers: HostPeers, meter: WireMeter, *, whole_up_to_bytes: int) -> None:
        """`whole_up_to_bytes`: of a group that is laid out at once."""
        self._peers = peers
        self._meter = meter
        self._whole_up_to_bytes = whole_up_to_bytes
        self._unsummed: deque[Callable[[], None]] = deque()
        self._heap = Backward()
        self.is_whole: Callable[[HostWeight], None] = lambda weight: None  # called when `local.grad` is the sum

    @torch.no_grad()
    def add(self, group: Sequence[HostWeight]) -> None:
        """This rank's gradients of a group are made: `whole.grad` goes, `local.grad` grows by the sum over all ranks.

        A parameter that this rank had no use for counts as zero."""
        nbytes = sum(weight.whole.nbytes for weight in group)
        self._heap.lays_out(nbytes)
        if nbytes <= self._whole_up_to_bytes:
            self._lay_out(group)
        else:
            # The moment that needs most, in a model with a large table.
            self._peers.unmap_others()
            for weight in group:
                self._pass_on(weight)

    def flush(self) -> None:
        """Sum what is left; afterwards the gradients are whole."""
        self._heap.ended()
        while self._unsummed:
            self._unsummed.popleft()()

    def _lay_out(self, group: Sequence[HostWeight]) -> None:
        """In slots of one size for groups of all sizes: what is not written takes no memory."""
        slot, layouts = self._take(group[0].whole.dtype, _up(self._whole_up_to_bytes, mmap.PAGESIZE))
        reads: list[Callable[[], None]] = []
        read_numel = first = 0
        for weight in group:
            places = layouts[:, first : first + weight.whole.numel()]
            first += weight.whole.numel()
            _show(weight.whole.grad, 0, weight.whole.numel(), places[self._peers.rank])
            weight.whole.grad = None
            reads.append(partial(_add_up, weight, 0, list(places[:, weight.begin : weight.end]), _begin_sum(weight)))
            read_numel += weight.end - weight.begin
        reads += [partial(self.is_whole, weight) for weight in group]
        self._announce(slot, read_numel * layouts.element_size(), reads)
        while len(self._unsummed) > MAX_UNSUMMED:
            self._unsummed.popleft()()

    def _pass_on(self, weight: HostWeight) -> None:
        """A large one, a piece of each rank's rows at a time."""
        self.flush()
        ranks, mine, whole = self._peers.size, self._peers.rank, weight.whole
        row_numel = whole.numel() // whole.shape[0]
        bounds = [rows_of_rank(whole.shape[0], rank, ranks) for rank in range(ranks)]
        owned = [(start * row_numel, stop * row_numel) for start, stop in bounds]
        at_once = max(1, PASSED_AT_ONCE_NUMEL // ranks)
        stride_bytes = _up(at_once * ranks * whole.element_size(), mmap.PAGESIZE)
        is_first = _begin_sum(weight)
        for offset in range(0, owned[0][1], at_once):
            slot, layouts = self._take(whole.dtype, stride_bytes)
            pieces = layouts[:, : ranks * at_once].view(ranks, ranks, at_once)  # by who shows it and who holds it
            for owner, (begin, end) in enumerate(owned):
                _show(whole.grad, begin + offset, min(begin + offset + at_once, end), pieces[mine, owner])
            numel = max(0, min(at_once, weight.end - weight.begin - offset))
            read = partial(_add_up, weight, offset, list(pieces[:, mine, :numel]), is_first)
            self._announce(slot, numel * whole.element_size(), [read])
            while len(self._unsummed) >= SLOTS_IN_TURN:
                self._unsummed.popleft()()
        whole.grad = None
        self.flush()
        self.is_whole(weight)

    def _take(self, dtype: torch.dtype, stride_bytes: int) -> tuple[Slot, torch.Tensor]:
        """A slot, and in it so much for each rank."""
        ranks, mine = self._peers.size, self._peers.rank
        self._peers.waited_seconds = 0.0
        own = slice(mine * stride_bytes, (mine + 1) * stride_bytes)
        slot = self._peers.take("reduce_scatter", ranks * stride_bytes, own)
        self._meter.add("reduce_scatter", exposed=self._peers.waited_seconds)
        layouts = torch.frombuffer(slot.map, dtype=dtype, count=ranks * stride_bytes // dtype.itemsize)
        return slot, layouts.view(ranks, -1)

    def _announce(self, slot: Slot, bytes_of_a_rank: int, reads: Sequence[Callable[[], None]]) -> None:
        read_bytes = (self._peers.size - 1) * bytes_of_a_rank
        arrival = _announce(self._peers, self._meter, "reduce_scatter", slot, read_bytes)

        def take_in() -> None:
            arrival()
            for read in reads:
                read()
            self._peers.release("reduce_scatter", slot)

        self._unsummed.append(take_in)


def _announce(peers: HostPeers, meter: WireMeter, kind: Kind, slot: Slot, read_bytes: int) -> Callable[[], None]:
    """This rank's part is written; what is returned waits until all are, of which so much is read."""
    began = time.monotonic()
    announcement = peers.announce(slot)

    def wait() -> None:
        peers.waited_seconds = 0.0
        told = peers.wait_for(announcement, slot)
        seconds = max(0.0, told - began)
        meter.add(kind, shared=read_bytes, seconds=seconds, exposed=peers.waited_seconds)

    return wait


def _show(gradient: torch.Tensor | None, begin: int, end: int, place: torch.Tensor) -> None:
    if begin >= end:
        return
    if gradient is None:
        place[: end - begin].zero_()
    else:
        place[: end - begin].copy_(gradient.view(-1)[begin:end])


def _begin_sum(weight: HostWeight) -> bool:
    """Whether this is the first of a step; there is a place for it then."""
    is_first = weight.local.grad is None
    if is_first:
        weight.local.grad = torch.empty_like(weight.local, dtype=torch.float32)
    return is_first


def _add_up(weight: HostWeight, offset: int, rows: Sequence[torch.Tensor], is_first: bool) -> None:
    """Of a weight's rows here, from the offset on: in fp32, the first rank's first, then what earlier passes left."""
    assert weight.local.grad is not None
    total = weight.local.grad.view(-1)[offset : offset + rows[0].numel()]
    for begin in range(0, total.numel(), NUMEL_AT_ONCE):
        piece = total[begin : begin + NUMEL_AT_ONCE]
        into = piece if is_first else torch.empty_like(piece)
        into.copy_(rows[0][begin : begin + NUMEL_AT_ONCE])
        for row in rows[1:]:
            into.add_(row[begin : begin + NUMEL_AT_ONCE])
        if not is_first:
            piece.add_(into)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
