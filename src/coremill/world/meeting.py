"""How ranks find each other before there is a process group: the store rank 0 serves, and the roll called on it.

Torch is imported only inside functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from coremill.errors import InputError, PeerLost
from coremill.hardware.probe import boot_id
from coremill.world.identity import LOOPBACK, RankIdentity
from coremill.world.lost_peers import peer_errors
from coremill.world.sockets import listen_for_store, own_address_towards, reaches

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class ClaimedTwice(InputError):
    """Another process is this rank already, or was in an attempt whose store is about to go."""

    beats = 0  # of that process, so far: they go on where it lives


POLL_SECONDS = 0.05
FRESH_SECONDS = 2.0  # so long ago a rank that waits has shown itself
ABANDONED_SECONDS = 5.0  # who has not for so long is gone, and its place may be taken
OLD_STORE_SECONDS = 120.0  # so long the store of an attempt before may stay
ALIVE_SECONDS = 20.0  # a rank that lives counts at least every 5 s (peer_progress.py)
TELLING_SECONDS = 180.0  # how long other nodes are waited for, to tell them that one has refused its input
REFUSAL = "refusal"  # where a node that starts no ranks leaves its words
SLOWEST_POLL_SECONDS = 0.5


def meet_at_a_fresh_store(identity: RankIdentity, deadline: float) -> tuple[Store, list[dict[str, Any]]]:
    """Under launchers of ours on several hosts each starts its ranks again by itself, and some are quicker than others:
    a store in which this rank is there already may be that of the attempt before, and goes in a moment; or later, where
    rank 0 has not noticed yet. It is refused only where the other process of this rank lives."""
    may_be_old = identity.launcher == "coremill" and not identity.is_one_host
    began = moved_at = time.monotonic()
    beats = -1
    while True:
        store = open_store(identity, deadline)
        try:
            return store, call_the_roll(store, identity, deadline)
        except ClaimedTwice as error:
            now = time.monotonic()
            if error.beats != beats:
                beats, moved_at = error.beats, now
            lives = now - moved_at < ALIVE_SECONDS
            if not may_be_old or identity.rank == 0 or (lives and now - began >= OLD_STORE_SECONDS):
                raise
            if now >= deadline:
                raise PeerLost(
                    f"rank {identity.rank} waited in vain for the others to start again",
                    do="look at the log of rank 0: it still waits for a rank that is gone",
                ) from error
        time.sleep(SLOWEST_POLL_SECONDS)


def open_store(identity: RankIdentity, deadline: float) -> Store:
    """The store of this run: served by rank 0, always a fresh one.

    Under torchrun the agent's store only carries the address of ours: torchrun 2.13 keeps its store through restarts,
    and ranks that use it directly dial the dead ranks of the attempt before.
    """
    from torch._C._distributed_c10d import TCPStore

    def client(host: str, port: int) -> Store:
        if not identity.is_one_host:  # there rank 0 may be away for as long as a new machine takes
            _wait_for(lambda: reaches(host, port), deadline - 1.0)
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            return TCPStore(host, port, identity.size, is_master=False, timeout=left, wait_for_workers=False)
        except RuntimeError as error:
            raise PeerLost(
                f"rank {identity.rank} could not reach rank 0 at {host}:{port}",
                why=str(error).splitlines()[0],
                do="check that MASTER_ADDR is the host of rank 0 and that the port is open between the hosts",
            ) from error

    agent = client(identity.master_address, identity.master_port) if identity.agent_store else None
    if identity.rank == 0:
        store, port = serve_store(identity, timedelta(seconds=max(1.0, deadline - time.monotonic())))
        if agent is not None:
            host = own_address_towards(identity.master_address, is_one_host=identity.is_one_host)
            agent.set("coremill/store", json.dumps([host, port]))
        return store
    if agent is None:
        return client(identity.master_address, identity.master_port)
    while time.monotonic() < deadline:
        if agent.check(["coremill/store"]):
            host, port = json.loads(agent.get("coremill/store"))
            if reaches(host, port):  # an address of an attempt before is refused: wait for the new one
                return client(host, port)
        time.sleep(POLL_SECONDS)
    raise PeerLost(f"rank {identity.rank} waited for rank 0 in vain", do="look at the log of rank 0")


def _wait_for(is_there: Callable[[], bool], deadline: float, slowest_seconds: float = 2 * POLL_SECONDS) -> None:
    """In Python, as torch's own waiting hears no signal: a request to stop would be answered when the others come."""
    pause = POLL_SECONDS / 10
    while not is_there() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 1.5, slowest_seconds)


def serve_store(identity: RankIdentity, timeout: timedelta) -> tuple[Store, int]:
    """A fresh store as rank 0 has it, and its port."""
    from torch._C._distributed_c10d import TCPStore

    listener = listen_for_store(identity)
    bound, port = listener.getsockname()[:2]
    connect_to = LOOPBACK if bound in ("0.0.0.0", "::") else bound
    # The store owns the descriptor from here on. Handing it a bound socket is the only way to keep it off other
    # interfaces: by itself it listens on all of them, whatever MASTER_ADDR says.
    store = TCPStore(
        connect_to, port, identity.size, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def beats_of(rank: int) -> str:
    """Where a rank counts, at the meeting and after it, as long as it lives."""
    return f"beats/{rank}"


def call_the_roll(store: Store, identity: RankIdentity, deadline: float) -> list[dict[str, Any]]:
    """Every rank says who it is; rank 0 checks that all are there and agree, and tells everyone the outcome."""
    host = socket.gethostname()
    entry = {
        "size": identity.size,
        "host": host,
        "machine": machine_id() if identity.node_rank is None else f"node {identity.node_rank}",
        "local_rank": identity.local_rank,
        "cores": len(os.sched_getaffinity(0)),
        "time": time.time(),
    }
    with peer_errors():
        if store.add(f"claims/{identity.rank}", 1) > 1 and not _is_abandoned(store, identity.rank):
            refused = ClaimedTwice(
                f"two processes say they are rank {identity.rank}",
                where=f"this one runs on {host}",
                why="RANK must differ between processes; perhaps the same command was started twice",
            )
            refused.beats = store.add(beats_of(identity.rank), 0)
            raise refused
        store.set(f"entries/{identity.rank}", json.dumps(entry))
        if identity.rank == 0:
            store.set("roll", json.dumps(_collect(store, identity.size, deadline)))
        # Others wait a little longer than rank 0 does, to hear from it who was missing.
        slack = 0.0 if identity.rank == 0 else 5.0
        slowest = min(SLOWEST_POLL_SECONDS, 2 * POLL_SECONDS * max(1.0, identity.size / 200))
        _wait_for(lambda: _is_called(store, identity.rank), deadline + slack, slowest)
        store.wait(["roll"], timedelta(seconds=1.0))
        roll = json.loads(store.get("roll"))
        if "refused" in roll:
            _pass_on(store, identity)
            words = roll["refused"]
            raise InputError(f"node {words['node']} ({words['host']}) refused: {words['text']}")
    if roll["size"] != identity.size:
        raise InputError(
            f"rank {identity.rank} counts {identity.size} ranks and rank 0 counts {roll['size']}",
            where=f"this rank runs on {host}",
            why="WORLD_SIZE must be the same everywhere",
            do="give every host the same number of ranks",
        )
    if roll["other_sizes"]:
        raise InputError(
            f"{roll['other_sizes'][0]}, rank 0 counts {roll['size']}", why="WORLD_SIZE must be the same everywhere"
        )
    if roll["missing"]:
        names = ", ".join(str(rank) for rank in roll["missing"][:8]) + (" ..." if len(roll["missing"]) > 8 else "")
        raise PeerLost(
            f"{len(roll['missing'])} of {identity.size} ranks did not arrive in time: {names}",
            do="look at the logs of those ranks, and whether their hosts were started",
        )
    entries: list[dict[str, Any]] = roll["entries"]
    return entries


def _is_called(store: Store, rank: int) -> bool:
    """Whether the roll is over; who asks shows that it still waits."""
    store.add(beats_of(rank), 1)
    return store.check(["roll"])


def _is_abandoned(store: Store, rank: int) -> bool:
    """Whether the process that took this rank's place waits there no longer: it was lost before the others came."""
    if rank == 0:
        return False
    before, until = store.add(beats_of(rank), 0), time.monotonic() + ABANDONED_SECONDS
    while True:
        is_late = time.monotonic() >= until  # asked before the look: who stood still for so long looks once more
        if store.check(["roll"]) or store.add(beats_of(rank), 0) != before:
            return False
        if is_late:
            return True
        time.sleep(POLL_SECONDS)


def all_heard(store: Store, nodes: int) -> bool:
    """Whether a rank of every other node, or its launcher, has read that the roll is over."""
    return all(store.add(f"heard/{node}", 0) > 0 for node in range(1, nodes))


def _pass_on(store: Store, identity: RankIdentity) -> None:
    """Before a rank ends for a node's refusal: the first node's stay, with the store, until the others have read it."""
    if identity.node_rank:
        store.add(f"heard/{identity.node_rank}", 1)
        return
    deadline = time.monotonic() + TELLING_SECONDS
    while time.monotonic() < deadline and not all_heard(store, identity.size // identity.local_size):
        time.sleep(POLL_SECONDS)


def nodes_of(roster: Sequence[Mapping[str, Any]]) -> list[int]:
    """The node of every rank, counted in the order ranks name them.

    Launchers that do not number nodes leave what the machine is known by. Two containers may share that; a local rank
    that comes twice gives them away.
    """
    seen: dict[tuple[str, int], int] = {}
    numbers: dict[tuple[str, int], int] = {}
    nodes = []
    for entry in roster:
        local = (entry["machine"], entry["local_rank"])
        turn = seen[local] = seen.get(local, 0) + 1
        nodes.append(numbers.setdefault((entry["machine"], turn), len(numbers)))
    return nodes


def names_of(roster: Sequence[Mapping[str, Any]], nodes: Sequence[int]) -> tuple[str, ...]:
    """The host of every rank by name, for people; with the number of its node where hosts share a name."""
    named: dict[str, set[int]] = {}
    for entry, node in zip(roster, nodes, strict=True):
        named.setdefault(entry["host"], set()).add(node)
    return tuple(
        entry["host"] if len(named[entry["host"]]) == 1 else f"{entry['host']} (node {node})"
        for entry, node in zip(roster, nodes, strict=True)
    )


def machine_id() -> str:
    """Tells this machine from others, also from its clones and from containers beside this one.

    A name alone does not: clones share it, and containers may all be called localhost. A kernel has another boot id at
    every start; a container usually has a network of its own.
    """
    network = 0
    with contextlib.suppress(OSError):
        network = os.stat("/proc/self/ns/net").st_ino
    return f"{socket.gethostname()} {boot_id()} {network}"


def _collect(store: Store, size: int, deadline: float) -> dict[str, Any]:
    entries: dict[int, dict[str, Any]] = {}
    pause = POLL_SECONDS / 10
    waiting = _Waiting(store, size)
    gone: list[int] = []  # asked once: a rank that is late only now counts as there
    while (len(entries) < size or (gone := waiting.gone())) and time.monotonic() < deadline:
        for rank in range(size):
            if rank not in entries and store.check([f"entries/{rank}"]):
                entries[rank] = json.loads(store.get(f"entries/{rank}"))
        if any(entry["size"] != size for entry in entries.values()):
            break
        if store.check([REFUSAL]):
            return {"refused": json.loads(store.get(REFUSAL))}
        time.sleep(pause)
        pause = min(pause * 1.5, SLOWEST_POLL_SECONDS) if len(entries) < size else POLL_SECONDS / 2
    missing = [rank for rank in range(size) if rank not in entries]
    if not missing:  # by then one may have come in the place of another
        entries = {rank: json.loads(store.get(f"entries/{rank}")) for rank in range(size)}
        missing = [] if any(entry["size"] != size for entry in entries.values()) else gone
    return {
        "size": size,
        "missing": missing,
        "other_sizes": [
            f"rank {rank} on {entry['host']} counts {entry['size']} ranks"
            for rank, entry in sorted(entries.items())
            if entry["size"] != size
        ],
        "entries": [entries[rank] for rank in sorted(entries)],
    }


class _Waiting:
    """Which ranks still wait at the meeting, as rank 0 sees it: one that came and was lost since would be dialled in
    vain by all others."""

    def __init__(self, store: Store, size: int) -> None:
        self._store, self._others = store, range(1, size)
        self._beats: dict[int, int] = {}
        self._seen_at: dict[int, float] = {}

    def gone(self) -> list[int]:
        """Those that have not shown themselves lately; a rank has to be looked at twice."""
        now = time.monotonic()
        for rank in self._others:
            beats = self._store.add(beats_of(rank), 0)
            if beats != self._beats.setdefault(rank, beats):
                self._beats[rank], self._seen_at[rank] = beats, now
        return [rank for rank in self._others if now - self._seen_at.get(rank, -FRESH_SECONDS) > FRESH_SECONDS]
