"""What coremill puts on the wire: gathers and sums that move what they must, asynchronously, in a dtype of their own.

Gloo has no reduce-scatter: its own is a whole all-reduce, twice the bytes, and FSDP2 waits for it inside backward. Here
a reduce-scatter is an all-to-all of the pieces followed by a local fp32 sum: half the bytes, a quarter in 16 bits, all
peers at once, and backward goes on meanwhile. All sums are taken in rank order, so results repeat bit by bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from coremill.engines.wire.codec import Codec, shares_of
from coremill.engines.wire.exchange import Exchange, Flight, peers_of
from coremill.engines.wire.sizes import (
    LEAST_IN_FLIGHT,
    PIECE_NUMEL,
    ROOM_IN_FLIGHT_BYTES,
    WHOLE_UP_TO_NUMEL,
    rounded_up,
)
from coremill.errors import InputError
from coremill.model.heap import Backward

# Below this, another copy costs less than another call.
LEAST_MOVED_NUMEL = 2**13

# Newer torch warns, on the user's screen, about the name that older torch knows.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class BufferPool:
    """Buffers by size and dtype, used again: fresh memory for every layer would cost a page fault every 4 KiB.

    Sizes are rounded up by an eighth at most, so that nearly equal ones share: buckets of gradients are rarely equal,
    and by exact size each would have buffers of its own.
    Only up to `keep_up_to_numel` elements: an embedding's buffer is needed once a step and would lie idle for the rest.
    """

    def __init__(self, keep_up_to_numel: int = 2**62) -> None:
        self.keep_up_to_numel = keep_up_to_numel
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer with arbitrary content."""
        if numel > self.keep_up_to_numel:
            return torch.empty(numel, dtype=dtype)
        size = rounded_up(numel)
        free = self._free.get((size, dtype))
        return (free.pop() if free else torch.empty(size, dtype=dtype))[:numel]

    def give(self, buffer: torch.Tensor) -> None:
        if buffer.numel() > self.keep_up_to_numel:
            return
        size = rounded_up(buffer.numel())
        whole = torch.empty(0, dtype=buffer.dtype).set_(buffer.untyped_storage(), 0, (size,))  # type: ignore[call-overload]
        self._free.setdefault((size, buffer.dtype), []).append(whole)


class Deferred(dist.Work):
    """A collective with something left to do once it has arrived."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


class AllGather:
    """All-gather for FSDP2: always asynchronous, in the wire dtype.

    FSDP2 asks for a synchronous gather on CPU, but waits on any Work it is given before it copies out: returning one is
    enough to overlap.
    """

    def __init__(self, exchange: Exchange, wire_dtype: torch.dtype | None, *, as_ring: bool) -> None:
        self._exchange = exchange
        self._wire_dtype = wire_dtype  # None: as it comes
        # A ring crosses each network card once however many ranks are behind it; straight to all peers, every rank's
        # part would cross it once per rank over there.
        self._as_ring = as_ring

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        if self._wire_dtype is None or output_tensor.dtype == self._wire_dtype:
            return Deferred(self._start(output_tensor, input_tensor, group).wait)

        # Narrower on the wire: this rank's own part travels rounded too, so that all ranks compute with the same
        # weights. They arrive in the upper half of where they will be.
        narrow = output_tensor.view(self._wire_dtype)[output_tensor.numel() :]
        piece = narrow.view(group.size(), -1)[group.rank()]
        narrow_in_place(input_tensor, piece)
        flight = self._start(narrow, piece, group)

        def widen() -> None:
            flight.wait()
            widen_in_place(output_tensor, narrow)

        return Deferred(widen)

    def _start(self, whole: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> Flight:
        if not self._as_ring:
            return self._exchange.all_gather("gather", group, whole, piece)
        work = all_gather(whole, piece, group=group, async_op=True)
        return self._exchange.follow("gather", work, (group.size() - 1) * piece.numel() * piece.element_size())


def narrow_in_place(values: torch.Tensor, piece: torch.Tensor) -> None:
    """Write values in half their bytes to a place above them that they may reach into: from above, down to what is not
    read yet."""
    gap = (piece.data_ptr() - values.data_ptr()) // piece.element_size()
    end = values.numel()
    if gap < 2 * end:
        begin = max(0, end - LEAST_MOVED_NUMEL)
        piece[begin:].copy_(values[begin:].clone())
        end = begin
    while end:
        begin = max(0, 2 * end - gap)
        piece[begin:end].copy_(values[begin:end])
        end = begin


def widen_in_place(whole: torch.Tensor, narrow: torch.Tensor) -> None:
    """Values in half the bytes, in the upper half of `whole`, become all of it: from below, up to what is not read yet.

    A half, then a quarter, and so on; the little that is left is read first."""
    begin, end = 0, whole.numel()
    while (count := (end - begin) // 2) >= LEAST_MOVED_NUMEL:
        whole[begin : begin + count].copy_(narrow[begin : begin + count])
        begin += count
    whole[begin:].copy_(narrow[begin:].clone())


class ReduceScatter:
    """Reduce-scatter for FSDP2 as all-to-all and a local fp32 sum; results are in place after `flush`."""

    def __init__(self, exchange: Exchange, pool: BufferPool, codec: Codec) -> None:
        self._exchange = exchange
        self._pool = pool
        self._codec = codec
        self._in_flight: deque[tuple[int, Callable[[], None]]] = deque()  # bytes of its buffers, what ends it
        self._heap = Backward()
        self._is_laid_out = False
        self.waits = False  # for its results: where a group leaves twice in a pass, FSDP2 adds them up at once
        self.is_whole: Callable[[torch.Tensor], None] | None = None  # called when all of an output is the sum
        self.look: Callable[[torch.Tensor], None] | None = None  # shown what this rank puts in
        self.whole_numels: frozenset[int] | None = None  # of groups of which all gradients are made; None: any

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where FSDP2 lays gradients out; asked again, where it wants its share of the sum, which is fp32."""
        if not self._is_laid_out:
            self._heap.lays_out(prod(size) * dtype.itemsize)
        self._is_laid_out = not self._is_laid_out
        return torch.empty(*size, dtype=dtype if self._is_laid_out else torch.float32, device=device)

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
        if self.whole_numels is not None and input_tensor.numel() not in self.whole_numels:
            raise InputError(
                "backward made no gradient of some weights of a layer, and others may have on another rank",
                where="parallel.engine",
                why=f"before 2.13 torch cannot shard such a model over several hosts; this is {torch.__version__}",
                do="install torch 2.13, or set parallel.engine=replicate",
            )
        parts = input_tensor.view(group.size(), -1)
        columns = columns_at_once(parts.numel(), group.size(), self._pool.keep_up_to_numel)
        for begin in range(0, parts.shape[1], columns):
            end = begin + columns
            self._start(output_tensor[begin:end], parts[:, begin:end], group)
        if (is_whole := self.is_whole) is not None:
            self.follow(lambda: is_whole(output_tensor), held_bytes=0)
        while self.waits and self._in_flight:
            self._finish_first()

    def _start(self, output_tensor: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Send row r of `parts` to rank r; the sum of what arrives ends up in `output_tensor`."""
        mine, ranks = group.rank(), group.size()
        runs = [parts.shape[1]]
        length = self._codec.length(runs)
        as_laid_out = parts.dtype == self._codec.dtype  # then they are sent as they lie
        buffer_bytes = (ranks - 1) * length * self._codec.dtype.itemsize
        held_bytes = buffer_bytes + (parts.numel() * parts.element_size() if as_laid_out else buffer_bytes)
        self.make_room(held_bytes)
        receive = self._pool.take((ranks - 1) * length, self._codec.dtype)
        received = receive.view(ranks - 1, -1)
        send, outgoing = None, list(parts)
        if not as_laid_out:
            send = self._pool.take((ranks - 1) * length, self._codec.dtype)
            outgoing = with_own(send.view(ranks - 1, -1), mine, parts[mine])
            for rank in peers_of(group):
                self._codec.encode(parts[rank], runs, outgoing[rank])
        flight = self._exchange.all_to_all("reduce_scatter", group, with_own(received, mine, parts[mine]), outgoing)
        output_tensor.copy_(parts[mine])

        def finish() -> None:
            flight.wait()
            self._codec.add(received[:mine], received[mine:], runs, output_tensor)
            self._pool.give(receive)
            if send is not None:
                self._pool.give(send)

        self._in_flight.append((held_bytes, finish))

    def follow(self, finish: Callable[[], None], held_bytes: int) -> None:
        """A reduction that another has started; `finish` is called in turn."""
        self._in_flight.append((held_bytes, finish))

    def flush(self) -> None:
        """Wait for every reduction; afterwards the gradients are whole."""
        self._heap.ended()
        while self._in_flight:
            self._finish_first()

    def make_room(self, needed_bytes: int) -> None:
        """Finish the oldest until another may start."""
        while len(self._in_flight) >= LEAST_IN_FLIGHT:
            if sum(held for held, _ in self._in_flight) + needed_bytes <= ROOM_IN_FLIGHT_BYTES:
                return
            self._finish_first()

    def _finish_first(self) -> None:
        _, finish = self._in_flight.popleft()
        finish()


def with_own(rows: torch.Tensor, mine: int, own: torch.Tensor) -> list[torch.Tensor]:
    """Rows of all other ranks and, at its place, this rank's own."""
    return [*rows[:mine], own, *rows[mine:]]


def columns_at_once(numel: int, ranks: int, largest_layer_numel: int) -> int:
    """How much of every rank's part leaves at once: all of it, or a piece where a large embedding or head leaves."""
    if numel <= max(largest_layer_numel, WHOLE_UP_TO_NUMEL):
        return max(1, numel // ranks)
    return PIECE_NUMEL // ranks


def install(model: nn.Module, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
    """Give FSDP2 these collectives; gradients are summed, never divided: the loss is already normalised."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class AllReduce:
    """An all-reduce in stages, for fp32 gradients that every rank needs whole; the sums take their place.

    Two ranks send each other all they have: as many bytes as in two stages, and no sum is rounded. More: all-to-all,
    fp32 sum in rank order, gather of the sums. gloo's own ring adds in an order that depends on a gradient's place; in
    bf16 it rounds at every hop and sums at 1.3 GB/s on one thread. `advance` moves an exchange on by one stage; all
    ranks call it in the same order, but for the last one, which sends nothing.
    """

    def __init__(
        self,
        gradients: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        exchange: Exchange,
        pool: BufferPool,
        codec: Codec,
    ) -> None:
        self._group = group
        self._exchange = exchange
        self._pool = pool
        self._codec = codec
        ranks = group.size()
        pieces = [gradient.view(-1) for gradient in gradients]
        # By rank, what it sums: of two, each sums all.
        self._shares = [pieces] if ranks == 2 else shares_of(pieces, ranks)
        length = max(sum(codec.length([piece.numel()]) for piece in share) for share in self._shares)
        self._send, self._receive = (pool.take(len(self._shares) * length, codec.dtype) for _ in range(2))
        if ranks == 2:
            self._encode(pieces, self._send)
            self._flight = exchange.all_to_all("all_reduce", group, 2 * [self._receive], 2 * [self._send])
            self._stages: list[Callable[[], None]] = [self._add_both]
            return
        outgoing, incoming = self._send.view(ranks, -1), self._receive.view(ranks, -1)
        for rank in peers_of(group):
            self._encode(self._shares[rank], outgoing[rank])
        self._flight = exchange.all_to_all("all_reduce", group, list(incoming), list(outgoing))
        self._stages = [self._sum_and_gather, self._spread]

    def _encode(self, pieces: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
        for piece, place in self._places(pieces):
            self._codec.encode(piece, [piece.numel()], wire[place])

    def _places(self, pieces: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
        """Where each of them lies on the wire."""
        begin = 0
        for piece in pieces:
            end = begin + self._codec.length([piece.numel()])
            yield piece, slice(begin, end)
            begin = end

    def _add_both(self) -> None:
        """This rank's own as the other got it: both have the same sum."""
        self._flight.wait()
        for piece, place in self._places(self._shares[0]):
            self._codec.sum([self._send[place], self._receive[place]], [piece.numel()], piece)
        self._give_back()

    def _sum_and_gather(self) -> None:
        self._flight.wait()
        mine = self._group.rank()
        wires = self._receive.view(len(self._shares), -1)
        # Rounded like the others': which rank sums a gradient must not show in its bits.
        self._encode(self._shares[mine], wires[mine])
        for piece, place in self._places(self._shares[mine]):
            self._codec.sum([wire[place] for wire in wires], [piece.numel()], piece)
        self._encode(self._shares[mine], wires[mine])
        self._flight = self._exchange.all_gather("all_reduce", self._group, self._receive, wires[mine])

    def _spread(self) -> None:
        self._flight.wait()
        for share, wire in zip(self._shares, self._receive.view(len(self._shares), -1), strict=True):
            for piece, place in self._places(share):
                self._codec.decode(wire[place], [piece.numel()], piece)
        self._give_back()

    def _give_back(self) -> None:
        self._pool.give(self._send)
        self._pool.give(self._receive)

    @property
    def is_done(self) -> bool:
        return not self._stages

    @property
    def held_bytes(self) -> int:
        return self._send.nbytes + self._receive.nbytes if self._stages else 0

    def advance(self, *, waits: bool = True) -> bool:
        """One stage on; True once the sums are in place. Unless it `waits`, not to the last one before all is there."""
        if len(self._stages) > 1 or (self._stages and (waits or self._flight.has_arrived)):
            self._stages.pop(0)()
        return self.is_done

    def finish(self) -> None:
        while not self.advance():
            pass
