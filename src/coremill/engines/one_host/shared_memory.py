"""Ranks of one host, connected to each other: a socket between every two for messages, one file of memory for all.

A message is 32 bytes over a Unix socket: what happened, in which slot of the memory, in which use of it, when. The
kernel wakes who waits for one, orders it behind the memory written before it, and closes the socket of a rank that
dies: nobody waits for a dead one, and nobody spins.

The memory is a memfd that rank 0 makes and hands out over these sockets. It has no name and goes with the last rank.
Every rank cuts it into the same slots in the same order, so a slot's number says where it lies.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coremill.engines.one_host.cost import SLOTS_IN_TURN
from coremill.errors import PeerLost
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT
from coremill.world.sockets import SAME_HOST_PREFIX

MEETING_SECONDS = 60.0
# Virtual: the file has holes wherever nobody wrote.
FILE_BYTES = 2**42

_MESSAGE = struct.Struct("<IIQQQ")  # topic, slot, number, bytes, nanoseconds on the clock all processes share
_HELLO = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_READY, _DONE = 0, 1


@dataclass(eq=False)
class Slot:
    """A place in the memory, as this rank has it mapped."""

    number: int
    nbytes: int
    map: mmap.mmap
    own: slice  # the bytes that only this rank writes
    uses: int = 0

    def unmap_others(self) -> None:
        """What only others write out of this rank's resident memory; the file keeps it: every page is then resident in
        the rank that fills it."""
        begin, end = self.own.start // mmap.PAGESIZE * mmap.PAGESIZE, -(-self.own.stop // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin:
            self.map.madvise(mmap.MADV_DONTNEED, 0, begin)
        if end < len(self.map):
            self.map.madvise(mmap.MADV_DONTNEED, end, len(self.map) - end)


class HostPeers:
    """The other ranks of this host. All ranks take, announce and release slots in the same order."""

    def __init__(
        self,
        rank: int,
        connections: dict[int, socket.socket],
        file: int,
        timeout_seconds: float,
        standing_seconds: Callable[[], float],  # since any rank got on
    ) -> None:
        self.rank = rank
        self.size = len(connections) + 1
        self._connections = connections
        self._file = file
        self._timeout_seconds, self._standing_seconds = timeout_seconds, standing_seconds
        self._poll = select.poll()
        self._by_descriptor: dict[int, int] = {}
        for peer, connection in connections.items():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
            self._by_descriptor[connection.fileno()] = peer
        self._lost: set[int] = set()
        self._announced = 0
        self._heard: dict[int, dict[int, tuple[int, int, int]]] = {}  # announcement -> peer -> slot, bytes, time
        self._done: dict[int, dict[int, int]] = {}  # slot -> peer -> uses it is through with
        self._slots: list[Slot] = []
        self._free: dict[tuple[str, int], deque[Slot]] = {}
        self._count: dict[tuple[str, int], int] = {}
        self._end = 0
        self.waited_seconds = 0.0  # since somebody set it to zero

    def __del__(self) -> None:
        for connection in self._connections.values():
            connection.close()
        os.close(self._file)

    # --- slots

    def take(self, purpose: str, nbytes: int, own: slice) -> Slot:
        """A slot that nobody reads any more; waits for peers that still do."""
        key = (purpose, nbytes)
        free = self._free.setdefault(key, deque())
        if not free or self._count[key] < SLOTS_IN_TURN:
            slot = self._new_slot(nbytes, own)
            self._count[key] = self._count.get(key, 0) + 1
        else:
            slot = free.popleft()
            self._wait(lambda: self._readers(slot))
        slot.uses += 1
        return slot

    def keep(self, nbytes: int) -> Slot:
        """One that is never given back."""
        return self._new_slot(nbytes, slice(0, nbytes))

    def release(self, purpose: str, slot: Slot) -> None:
        """This rank has read what it wanted, and wrote what it wrote: its next use may be another's."""
        self._free[purpose, slot.nbytes].append(slot)
        self._tell(_DONE, slot.number, slot.uses, slot.nbytes)

    def unmap_others(self) -> None:
        """What the others filled out of this rank's resident memory, for a moment that needs much.

        Not after every use: mapping it anew cost 5 to 9 % of a step where weights are large beside the arithmetic."""
        for slot in self._slots:
            slot.unmap_others()

    def _new_slot(self, nbytes: int, own: slice) -> Slot:
        length = -(-max(1, nbytes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(self._file, length, offset=self._end)
        self._end += length
        self._slots.append(Slot(len(self._slots), nbytes, mapping, own))
        return self._slots[-1]

    def _readers(self, slot: Slot) -> list[int]:
        """Peers that are not known to be through with it."""
        done = self._done.get(slot.number, {})
        return [peer for peer in self._connections if done.get(peer, 0) < slot.uses]

    # --- messages

    def announce(self, slot: Slot) -> int:
        """This rank's part of the slot is written; the number of this announcement, the same on all ranks."""
        self._announced += 1
        self._tell(_READY, slot.number, self._announced, slot.nbytes)
        return self._announced

    def wait_for(self, announcement: int, slot: Slot) -> float:
        """Until all peers have announced theirs; when the last one did, in seconds of time.monotonic()."""
        heard = self._heard.setdefault(announcement, {})
        self._wait(lambda: [peer for peer in self._connections if peer not in heard])
        del self._heard[announcement]
        for peer, (number, nbytes, _) in heard.items():
            if (number, nbytes) != (slot.number, slot.nbytes):
                raise RuntimeError(
                    f"ranks are out of step: exchange {announcement} has {slot.nbytes} bytes in slot {slot.number} here"
                    f" and {nbytes} bytes in slot {number} on rank {peer}"
                )
        return max(told for _, _, told in heard.values()) / 1e9

    def _tell(self, topic: int, slot: int, number: int, nbytes: int) -> None:
        message = _MESSAGE.pack(topic, slot, number, nbytes, time.monotonic_ns())
        for peer, connection in self._connections.items():
            try:
                connection.send(message)
            except BlockingIOError:  # it has not read for hundreds of messages
                with self._waiting_seconds():
                    connection.settimeout(self._timeout_seconds)
                    try:
                        connection.send(message)
                    except OSError as error:
                        raise _lost(peer, str(error)) from error
                    finally:
                        connection.setblocking(False)
            except OSError:
                self._forget(peer)  # whoever waits for it raises that

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        """Read messages until nobody is missing."""
        if not missing():
            return
        self._read()
        if not missing():
            return
        with self._waiting_seconds():
            began = time.monotonic()
            while late := missing():
                gone = self._lost.intersection(late)
                if gone:
                    raise _lost(min(gone), "it closed its end")
                left = self._timeout_seconds - min(time.monotonic() - began, self._standing_seconds())
                if left <= 0:
                    raise _lost(late[0], f"it said nothing for {self._timeout_seconds:.0f} s", is_silent=True)
                self._poll.poll(1000 * left)
                self._read()

    @contextlib.contextmanager
    def _waiting_seconds(self) -> Iterator[None]:
        began = time.perf_counter()
        with HEARTBEAT.waiting():
            yield
        self.waited_seconds += time.perf_counter() - began

    def _read(self) -> None:
        """All messages that have come."""
        for descriptor, _ in self._poll.poll(0):
            peer = self._by_descriptor[descriptor]
            while True:
                try:
                    message = self._connections[peer].recv(_MESSAGE.size)
                except BlockingIOError:
                    break
                except OSError:
                    message = b""
                if len(message) != _MESSAGE.size:
                    self._forget(peer)
                    break
                topic, slot, number, nbytes, told = _MESSAGE.unpack(message)
                if topic == _READY:
                    self._heard.setdefault(number, {})[peer] = (slot, nbytes, told)
                else:
                    self._done.setdefault(slot, {})[peer] = number

    def _forget(self, peer: int) -> None:
        if peer not in self._lost:
            self._lost.add(peer)
            self._poll.unregister(self._connections[peer])


def _lost(peer: int, why: str, *, is_silent: bool = False) -> PeerLost:
    return PeerLost(
        "another rank stopped answering" if is_silent else "the connection to another rank was lost",
        why=f"rank {peer} of this host: {why}",
        do="look at the log of the rank that ended first; a full memory is the usual cause",
    )


# --- meeting


def meet_host_peers(world: World, *, on_every_host: bool = False) -> HostPeers | str:
    """Connect the ranks of this host to each other; in words why that cannot be. The same outcome on every rank.

    Where there are several hosts they meet only where that is wanted `on_every_host`."""
    if world.nodes > 1 and not on_every_host:
        return "ranks on several hosts"
    here = [rank for rank, name in enumerate(world.hostnames) if name == world.hostnames[world.rank]]
    with contextlib.ExitStack() as opened:
        listener, problem = None, ""
        try:
            listener = opened.enter_context(_listen(len(here)))
        except (AttributeError, OSError) as error:
            problem = f"no Unix socket: {error}"
        names = world.gather(["" if listener is None else listener.getsockname().decode("latin-1"), problem])
        made: HostPeers | None = None
        if listener is not None and all(name for name, _ in names):
            try:
                made = _connect(world, here.index(world.rank), listener, [names[rank][0] for rank in here])
            except (AttributeError, OSError, ValueError) as error:
                problem = f"rank {world.rank} cannot share memory with the others: {error}"
        problems: list[str] = [text for text in world.gather(problem) if text]
        if problems or made is None:
            return problems[0]
        return made


def _listen(backlog: int) -> socket.socket:
    """On a name that needs no file and goes with the socket; who calls is looked at."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(SAME_HOST_PREFIX + secrets.token_hex(16).encode())
    listener.listen(backlog)
    return listener


def _connect(world: World, rank: int, listener: socket.socket, names: list[str]) -> HostPeers:
    """Call the ranks of this host before this one, hear those after it; the first hands out the file."""
    deadline = time.monotonic() + MEETING_SECONDS
    connections: dict[int, socket.socket] = {}
    file = -1
    try:
        if rank == 0:
            file = os.memfd_create("coremill-ranks", os.MFD_CLOEXEC)
            os.ftruncate(file, FILE_BYTES)
        for peer in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections[peer] = connection
            connection.settimeout(MEETING_SECONDS)
            connection.connect(names[peer].encode("latin-1"))
            connection.send(_HELLO.pack(rank))
        if rank != 0:  # before those after it are heard: they do not come where the first one failed
            _, files, _, _ = socket.recv_fds(connections[0], 16, 1)
            if not files:
                raise OSError("the first rank sent no file")
            file = files[0]
            os.set_inheritable(file, False)
        while len(connections) < len(names) - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            connection, _ = listener.accept()
            connection.settimeout(MEETING_SECONDS)
            _, caller, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if caller != os.geteuid():
                connection.close()  # another user's process: not one of ours
                continue
            hello = connection.recv(_HELLO.size)
            if len(hello) != _HELLO.size:
                raise OSError("a rank hung up before it said which it is")
            (peer,) = _HELLO.unpack(hello)
            connections[peer] = connection
            if rank == 0:
                socket.send_fds(connection, [b"memory"], [file])
        with mmap.mmap(file, mmap.PAGESIZE, offset=FILE_BYTES - mmap.PAGESIZE):
            pass  # allowed here
        connections = dict(sorted(connections.items()))
        return HostPeers(rank, connections, file, world.timeout_seconds, world.progress.standing_seconds)
    except BaseException:
        listener.close()  # who called and was not heard yet is told at once
        for connection in connections.values():
            connection.close()
        if file >= 0:
            os.close(file)
        raise
