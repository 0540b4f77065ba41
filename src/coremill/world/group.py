"""How the ranks of a run talk: process group, device mesh, small exchanges, timeouts.

`identify(environ)` (world/identity.py) says which rank a launcher made of this process; `join_world(identity)` meets
the others and gives a `World`. Rank 0 serves the store that ranks meet at; collectives are gloo over TCP. On one host
both stay on the loopback device, so no other machine can reach them. What travels through `World` itself is JSON and
float64, never pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coremill.errors import CoremillError, Interrupted, PeerLost, Stopped
from coremill.world.heartbeat import HEARTBEAT
from coremill.world.identity import INTERFACE, RankIdentity
from coremill.world.lost_peers import as_peer_lost, follower_line, peer_errors
from coremill.world.meeting import (
    POLL_SECONDS,
    SLOWEST_POLL_SECONDS,
    meet_at_a_fresh_store,
    names_of,
    nodes_of,
)
from coremill.world.peer_progress import PeerProgress
from coremill.world.sockets import close_sockets_since, flows_of, interface_for_flows, interface_towards, open_sockets
from coremill.world.stop import REQUESTS

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

# So long a rank waits while no rank gets on (world/peer_progress.py); torch waits 30 minutes for a silent peer.
DEFAULT_TIMEOUT_SECONDS = 300.0
# gloo's own limit is put out of the way: it knows nothing of the work that is waited for.
GLOO_TIMEOUT = timedelta(days=7)
HEARTBEAT_SECONDS = 2.0
HEARING_SECONDS = 15.0  # a failing rank waits this long for the others to hear why
HEARING_STOP_SECONDS = 3.0  # and one that was asked to stop: most often all were, and leave without a word
FOLLOWING_SECONDS = 2.0  # torchrun and mpirun name the rank that ends first: let it be the one that failed


class PeerFailed(CoremillError):
    """Another rank failed and says why; this one ends with the same exit code and prints nothing."""

    silent = True

    def __init__(self, what: str, *, failed_rank: int, exit_code: int) -> None:
        super().__init__(what)
        self.failed_rank = failed_rank
        self.exit_code = exit_code


@dataclass(kw_only=True)
class World:
    """All ranks of a run, seen from one of them. Every rank calls its methods in the same order."""

    identity: RankIdentity
    node_rank: int
    nodes: int
    node_of_rank: tuple[int, ...]  # what tells hosts apart
    hostnames: tuple[str, ...]  # by rank, for people: no two nodes have the same
    store: Store
    timeout_seconds: float
    progress: PeerProgress
    attempt: float = 0.0  # when rank 0 came to the meeting, by its clock (unix seconds): the same on all ranks
    flows: int = 1  # connections to each peer
    _meshes: list[DeviceMesh] = field(default_factory=list, repr=False)
    _once_calls: int = field(default=0, repr=False)

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def size(self) -> int:
        return self.identity.size

    @property
    def local_rank(self) -> int:
        return self.identity.local_rank

    @property
    def local_size(self) -> int:
        return self.identity.local_size

    def whereabouts(self) -> dict[str, Any]:
        """For an event: which rank of how many, and where. Hosts of one name have different nodes."""
        where = {"hostname": socket.gethostname(), "node": self.node_rank, "attempt": self.attempt}
        return {"world_size": self.size, "local_rank": self.local_rank, **where}

    @property
    def group(self) -> ProcessGroup:
        import torch.distributed as dist

        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("the world was left")
        return group

    def mesh(self) -> DeviceMesh:
        """All ranks in one line, on the CPU: always explicit, since torch takes a GPU by itself where there is one."""
        if not self._meshes:
            from torch.distributed.device_mesh import init_device_mesh

            self._meshes.append(init_device_mesh("cpu", (self.size,)))
        return self._meshes[0]

    def gather(self, value: Any) -> list[Any]:
        """The JSON-able value of every rank, by rank, on every rank."""
        import torch
        import torch.distributed as dist

        with peer_errors():
            mine = _to_tensor(value)
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([mine.numel()]))
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: mine.numel()] = mine
            texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(texts, padded)
        return [_from_tensor(text[: int(length)]) for text, length in zip(texts, lengths, strict=True)]

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """The JSON-able value of one rank, on every rank; what the others pass is not looked at."""
        import torch
        import torch.distributed as dist

        with peer_errors():
            text = _to_tensor(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
            length = torch.tensor([text.numel()])
            dist.broadcast(length, source)
            if self.rank != source:
                text = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(text, source)
        return _from_tensor(text)

    def barrier(self) -> None:
        import torch.distributed as dist

        with peer_errors():
            dist.barrier()

    def sum(self, value: float) -> float:
        """The sum over all ranks, in double, the same bits on each."""
        return self.sums([value])[0]

    def sums(self, values: Sequence[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        with peer_errors():
            totals = torch.tensor(list(values), dtype=torch.float64)
            if totals.numel():
                dist.all_reduce(totals)
        return [float(total) for total in totals]

    def once_per_node(self, action: Callable[[], T]) -> T:
        """Run `action` on local rank 0 of each host; every rank gets its host's JSON-able result, or raises.

        It may take longer than a collective may: the working ranks send heartbeats, and the others wait as long as
        those come. Where it fails, the failing rank raises its own error and all others `PeerFailed` with the same
        exit code.
        """
        self._once_calls += 1
        prefix = f"once/{self._once_calls}"
        if self.local_rank == 0:
            with _heartbeats(self.store, f"{prefix}/beat"):
                try:
                    text = json.dumps({"value": action()})
                except BaseException as error:  # KeyboardInterrupt too: nobody waits for a rank that leaves
                    self._tell_failure(prefix, error)
                    raise
            with peer_errors():
                self.store.set(f"{prefix}/node/{self.node_rank}", text)
                self.store.add(f"{prefix}/done", 1)
        with peer_errors():
            result: T = self._wait_for_nodes(prefix)
        return result

    def _tell_failure(self, prefix: str, error: BaseException) -> None:
        """Tell the others why, and give them a moment to hear it: when rank 0 leaves, the store goes with it.

        Where they are gone already, or who started them ends this one with them, the error itself is what counts.
        """
        seconds = HEARING_STOP_SECONDS if isinstance(error, Stopped | Interrupted) else HEARING_SECONDS
        exit_code = getattr(error, "exit_code", 1)
        failure = {"error": str(error), "rank": self.rank, "exit_code": exit_code, "hearing_seconds": seconds}
        with contextlib.suppress(RuntimeError, Stopped):
            if self.store.add(f"{prefix}/failures", 1) == 1:
                self.store.set(f"{prefix}/failed", json.dumps(failure))
            self._wait_for_hearers(prefix, seconds)

    def _wait_for_hearers(self, prefix: str, seconds: float) -> None:
        """Until every rank has heard of the failure, or failed as well."""
        deadline = time.monotonic() + seconds
        while self.store.add(f"{prefix}/heard", 0) + self.store.add(f"{prefix}/failures", 0) < self.size:
            if time.monotonic() >= deadline:
                return
            time.sleep(POLL_SECONDS)

    def _wait_for_nodes(self, prefix: str) -> Any:
        """Poll until every host is done or one failed; give up when no heartbeat came for the timeout."""
        beats, last_change = -1, time.monotonic()
        pause = POLL_SECONDS
        while True:
            if self.store.check([f"{prefix}/failed"]):
                failure = json.loads(self.store.get(f"{prefix}/failed"))
                self.store.add(f"{prefix}/heard", 1)
                self._follow(prefix, failure["rank"], failure["hearing_seconds"])
                raise PeerFailed(failure["error"], failed_rank=failure["rank"], exit_code=failure["exit_code"])
            if self.store.add(f"{prefix}/done", 0) >= self.nodes:
                return json.loads(self.store.get(f"{prefix}/node/{self.node_rank}"))["value"]
            seen = self.store.add(f"{prefix}/beat", 0)
            if seen != beats:
                beats, last_change = seen, time.monotonic()
            elif time.monotonic() - last_change > self.timeout_seconds:
                raise PeerLost(
                    f"local rank 0 of a host gave no sign of life for {self.timeout_seconds:.0f} s",
                    do="look at the log of the first rank of each host",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, SLOWEST_POLL_SECONDS)

    def _follow(self, prefix: str, failed_rank: int, hearing_seconds: float) -> None:
        """Under coremill's launcher standard error is this rank's log: say there why it ends. Others blame the rank
        that ends first and end the rest with SIGTERM: it is to be the one that failed."""
        if self.identity.launcher == "coremill":
            print(follower_line(self.rank, failed_rank), file=sys.stderr, flush=True)
        else:
            with contextlib.suppress(Stopped):
                with contextlib.suppress(RuntimeError):  # the store is gone, and with it rank 0
                    self._wait_for_hearers(prefix, hearing_seconds)
                    until = time.monotonic() + hearing_seconds
                    while failed_rank == 0 and time.monotonic() < until:
                        self.store.check([prefix])
                        time.sleep(POLL_SECONDS)
                time.sleep(FOLLOWING_SECONDS)

    def close(self) -> None:
        """Give the process group back; all ranks have met before that."""
        import torch.distributed as dist

        if dist.is_initialized():
            self._meshes.clear()
            dist.destroy_process_group()


@contextlib.contextmanager
def join_world(identity: RankIdentity, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Iterator[World]:
    """Meet the other ranks, and leave them at the end; a connection lost in between is raised as `PeerLost`.

    After an exception nothing is waited for: the sockets are shut, so that the other ranks notice at once and the
    collectives still under way here end (torch would wait for them, up to the timeout, even when the process exits).
    """
    sockets_before = open_sockets()
    device = _device(identity)
    try:
        with contextlib.ExitStack() as stack:
            HEARTBEAT.enter("meet")
            store, roster = meet_at_a_fresh_store(identity, time.monotonic() + timeout_seconds)
            progress = PeerProgress(store, identity.rank, timeout_seconds, partial(close_sockets_since, sockets_before))
            if identity.size > 1:
                stack.enter_context(progress)
            with REQUESTS.held_back():  # all others dial this rank now, and would wait for it
                world = _connect(identity, store, roster, device, progress)
            yield world
            world.barrier()
        world.close()
    except BaseException as error:
        _leave_at_once(sockets_before)
        lost = as_peer_lost(error)
        if lost is None or lost is error:
            raise
        raise lost from error
    finally:
        if device is not None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _device(identity: RankIdentity) -> str | None:
    """For gloo to use; None where the user's own variable names one, or none can be told."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    towards = None if identity.is_one_host else identity.master_address
    return os.environ.get(INTERFACE) or interface_towards(towards)


def _connect(
    identity: RankIdentity, store: Store, roster: list[dict[str, Any]], device: str | None, progress: PeerProgress
) -> World:
    """Every rank with every other."""
    import torch.distributed as dist

    if device is not None:
        hosts, fewest_cores = identity.size // identity.local_size, min(entry["cores"] for entry in roster)
        os.environ["GLOO_SOCKET_IFNAME"] = interface_for_flows(device, hosts, fewest_cores)
    rank, size = identity.rank, identity.size
    with peer_errors():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GLOO_TIMEOUT)
    _let_compute_finish()
    nodes = nodes_of(roster)
    HEARTBEAT.enter("other")
    return World(
        identity=identity,
        node_rank=nodes[rank],
        nodes=len(set(nodes)),
        node_of_rank=tuple(nodes),
        hostnames=names_of(roster, nodes),
        store=store,
        timeout_seconds=progress.timeout_seconds,
        flows=flows_of(os.environ.get("GLOO_SOCKET_IFNAME", "")),
        progress=progress,
        attempt=roster[0]["time"],
    )


def _let_compute_finish() -> None:
    """Make gloo's threads batch threads, so that they do not interrupt compute threads.

    Ranks give all their cores to arithmetic, and gloo's threads wake for every few packets. Under the kernel's usual
    policy each time one of them takes the core at once, and the product it broke into finds its caches gone. As batch
    threads they have the same share of the core, but wait for the end of a compute thread's slice, a few milliseconds,
    and then find more to do; a core that idles they take at once, as ever.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it
            if (task / "comm").read_text().startswith("gloo"):
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _leave_at_once(sockets_before: frozenset[str]) -> None:
    import torch.distributed as dist

    close_sockets_since(sockets_before)
    if dist.is_initialized():
        # With the sockets shut this returns in milliseconds; the thread is there for the day it does not.
        thread = threading.Thread(target=_destroy_quietly, daemon=True)
        thread.start()
        thread.join(timeout=2.0)


def _destroy_quietly() -> None:
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        dist.destroy_process_group()


@contextlib.contextmanager
def _heartbeats(store: Store, key: str) -> Iterator[None]:
    """Count up `key` in the background while the body works."""
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # a lost store shows in the body's next exchange
            while not done.wait(HEARTBEAT_SECONDS):
                HEARTBEAT.mark()  # those who wait elsewhere go by it
                store.add(key, 1)

    thread = threading.Thread(target=beat, daemon=True, name="coremill-once-per-node")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _to_tensor(value: Any) -> Any:
    import torch

    # bytearray: torch warns about memory it cannot write to.
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(text: Any) -> Any:
    return json.loads(text.numpy().tobytes())
