"""Exchanges between ranks: pieces sent straight from and into the tensors they belong to, over several flows, timed.

Gloo's collectives allocate a buffer of their own, copy it out on a thread of theirs, and use one connection per peer.
Here every piece is a send and a receive of its own, all posted at once: no copy, no gloo worker, all peers in parallel.
Where the interface is named several times in GLOO_SOCKET_IFNAME, gloo keeps as many connections to each peer, and
large pieces are cut to use them all: clouds cap what one connection may carry.

One thread of the process waits for what is under way and notes when it arrived; whoever needs the data waits for that
note. So the time of an exchange is known even where nobody had to wait for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from coremill.world.heartbeat import HEARTBEAT

# Pieces are cut for several flows down to this. A flow more wakes a thread of gloo's more, on a core that computes; and
# what is sent next takes another flow anyway.
LEAST_BYTES_PER_FLOW = 2 * 2**20
# Exchanges on the wire at once. One alone would leave it idle from each one's end to the next one's start; many would
# share it, and the one that is needed first would come late.
MOST_UNDER_WAY = 2
_LAST_TAG = 2**30  # gloo takes 31 bits

Kind = Literal["gather", "reduce_scatter", "all_reduce", "agreement"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class CollectiveUse:
    """What one kind of collective cost one rank in one step."""

    bytes: int = 0  # sent
    shared_bytes: int = 0  # read from ranks of the same host, through memory they share
    seconds: float = 0.0  # from its start to its arrival, hidden or not; several may run side by side
    exposed_seconds: float = 0.0  # that the compute threads stood waiting


class WireMeter:
    """Counts what one rank sends, how long that takes, and how long its compute threads stand waiting."""

    def __init__(self) -> None:
        self._uses = dict.fromkeys(KINDS, CollectiveUse())

    def add(self, kind: Kind, *, sent: int = 0, shared: int = 0, seconds: float = 0.0, exposed: float = 0.0) -> None:
        use = self._uses[kind]
        self._uses[kind] = CollectiveUse(
            use.bytes + sent, use.shared_bytes + shared, use.seconds + seconds, use.exposed_seconds + exposed
        )

    def take(self) -> dict[Kind, CollectiveUse]:
        """Since the last call; kinds that did not occur are left out."""
        taken = {kind: use for kind, use in self._uses.items() if use != CollectiveUse()}
        self._uses = dict.fromkeys(KINDS, CollectiveUse())
        return taken


class Flight:
    """Something under way between ranks, or queued for it."""

    def __init__(self, kind: Kind, meter: WireMeter, then: Callable[[], None] = lambda: None) -> None:
        self._kind = kind
        self._meter = meter
        self._then = then
        self._began = time.perf_counter()
        self._arrived_at = 0.0
        self._error: BaseException | None = None
        self._arrived = threading.Event()

    def arrived(self, error: BaseException | None) -> None:
        """Called by the thread that waits."""
        self._arrived_at, self._error = time.perf_counter(), error
        self._arrived.set()
        self._then()

    @property
    def has_arrived(self) -> bool:
        """Whether nobody would have to wait."""
        return self._arrived.is_set()

    def wait(self) -> None:
        """Until it has arrived; a lost peer is raised here."""
        exposed = 0.0
        if not self.has_arrived:
            waited_from = time.perf_counter()
            with HEARTBEAT.waiting():
                self._arrived.wait()
            self._arrived_at = time.perf_counter()  # for who waits, it is there when they go on
            exposed = self._arrived_at - waited_from
        if self._error is not None:
            raise self._error
        self._meter.add(self._kind, seconds=self._arrived_at - self._began, exposed=exposed)


class Exchange:
    """Sends and receives among the ranks of a group. All ranks start the same exchanges in the same order."""

    def __init__(self, meter: WireMeter, flows: int = 1, least_bytes_per_flow: int = LEAST_BYTES_PER_FLOW) -> None:
        self._meter = meter
        self._flows = flows
        self._least_bytes_per_flow = least_bytes_per_flow
        self._count = 0
        self._lock = threading.Lock()
        self._under_way = 0
        self._queue: deque[tuple[Flight, Callable[[], list[dist.Work]]]] = deque()

    def all_to_all(
        self, kind: Kind, group: dist.ProcessGroup, receive: Sequence[torch.Tensor], send: Sequence[torch.Tensor]
    ) -> Flight:
        """Piece r of `send` goes to rank r; what is at this rank's own place, in either, is left alone.

        Pieces are contiguous; what a rank sends here, that rank receives there."""
        flight, post = Flight(kind, self._meter, then=self._one_arrived), self._prepare(kind, group, receive, send)
        with self._lock:
            self._queue.append((flight, post))
        self._move_up()
        return flight

    def ahead_of_queue(
        self, kind: Kind, group: dist.ProcessGroup, receive: Sequence[torch.Tensor], send: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """The same ahead of those queued, for little that much waits for; what is returned waits until it is there."""
        began = time.perf_counter()
        works = self._prepare(kind, group, receive, send)()

        def wait() -> None:
            waited_from = time.perf_counter()
            with HEARTBEAT.waiting():
                for work in works:
                    work.wait()
            there = time.perf_counter()
            self._meter.add(kind, seconds=there - began, exposed=there - waited_from)

        return wait

    def _prepare(
        self, kind: Kind, group: dist.ProcessGroup, receive: Sequence[torch.Tensor], send: Sequence[torch.Tensor]
    ) -> Callable[[], list[dist.Work]]:
        """What posts an exchange, counted and with tags of its own."""
        self._count = (self._count + 1) % (_LAST_TAG // self._flows)
        peers = peers_of(group)
        incoming = [(peer, part, tag) for peer in reversed(peers) for part, tag in self._parts(receive[peer])]
        outgoing = [(peer, part, tag) for peer in peers for part, tag in self._parts(send[peer])]

        def post() -> list[dist.Work]:
            works = [dist.irecv(part, group=group, group_src=peer, tag=tag) for peer, part, tag in incoming]
            works += [dist.isend(part, group=group, group_dst=peer, tag=tag) for peer, part, tag in outgoing]
            return [work for work in works if work is not None]

        self._meter.add(kind, sent=sum(part.numel() * part.element_size() for _, part, _ in outgoing))
        return post

    def _one_arrived(self) -> None:
        with self._lock:
            self._under_way -= 1
        self._move_up()

    def _move_up(self) -> None:
        """Post those queued, in order, while there is room; called by whoever adds one or sees one arrive."""
        with self._lock:
            while self._queue and self._under_way < MOST_UNDER_WAY:
                flight, post = self._queue.popleft()
                self._under_way += 1
                try:
                    _watch(flight, post())
                except BaseException as error:  # whoever waits for this flight raises it
                    _watch(flight, error)

    def follow(self, kind: Kind, work: dist.Work, sent: int) -> Flight:
        """A collective of gloo's own, counted and timed like the others."""
        self._meter.add(kind, sent=sent)
        flight = Flight(kind, self._meter)
        _watch(flight, [work])
        return flight

    def all_gather(self, kind: Kind, group: dist.ProcessGroup, whole: torch.Tensor, piece: torch.Tensor) -> Flight:
        """`piece` becomes part r of every rank's `whole`; it may lie there already."""
        parts = whole.view(group.size(), -1)
        flight = self.all_to_all(kind, group, list(parts), [piece] * group.size())
        mine = parts[group.rank()]
        if piece.data_ptr() != mine.data_ptr():
            mine.copy_(piece)
        return flight

    def _parts(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """A tensor in as many parts as there are flows, each with a tag that gloo maps to that flow."""
        if not tensor.numel():
            return []
        first = self._count * self._flows
        parts = min(self._flows, max(1, tensor.numel() * tensor.element_size() // self._least_bytes_per_flow))
        if parts == 1:
            return [(tensor, first + self._count % self._flows)]
        return [(part, first + index) for index, part in enumerate(tensor.view(-1).chunk(parts))]


def peers_of(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, the next one first: no rank is everybody's first."""
    return [(group.rank() + distance) % group.size() for distance in range(1, group.size())]


# --- the thread that waits

_waiting: queue.SimpleQueue[tuple[Flight, Sequence[dist.Work] | BaseException]] = queue.SimpleQueue()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def _watch(flight: Flight, works: Sequence[dist.Work] | BaseException) -> None:
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_wait_in_order, daemon=True, name="coremill-wire")
            _thread.start()
    _waiting.put((flight, works))


def _wait_in_order() -> None:
    while True:
        flight, works = _waiting.get()
        error: BaseException | None = None
        try:
            if isinstance(works, BaseException):
                raise works
            for work in works:
                work.wait()
        except BaseException as caught:  # whoever waits for this flight raises it
            error = caught
        flight.arrived(error)
        del flight, works, error
