"""Telling lost peers from other errors; the world itself is tested on real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from coremill.errors import CoremillError, InputError, PeerLost, Stopped
from coremill.hosts.ssh import Host
from coremill.launch.node_command import node_commands
from coremill.launch.request import Request
from coremill.world import group as world
from coremill.world.group import PeerFailed
from coremill.world.identity import INTERFACE, RankIdentity, identify
from coremill.world.lost_peers import as_peer_lost
from coremill.world.stop import signals_lent


class DistError(RuntimeError):
    """Stands for torch's class of that name, so that this test needs no torch."""


class DistStoreError(DistError):
    """Likewise."""


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "silent_peer"),
    [
        (RuntimeError(GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:44183. This is typically"), False),
        (RuntimeError(GLOO + "pair.cc:553] Connection reset by peer"), False),
        (RuntimeError(GLOO + "unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"), True),
        (RuntimeError("Gloo connectFullMesh failed with [...] Connection refused"), False),
        (DistStoreError("wait timeout after 10000ms, keys: /nokey"), True),
        (DistError("failed to recv, got 0 bytes"), False),
    ],
)
def test_lost_peers(error: BaseException, silent_peer: bool) -> None:
    lost = as_peer_lost(error)
    assert lost is not None and lost.exit_code == 69
    assert ("stopped answering" in lost.what) == silent_peer
    assert lost.why and lost.do


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("Connection closed by peer"),  # of somebody's download
        TimeoutError("timed out waiting for gloo"),
        KeyboardInterrupt(),
        DistError("invalid device"),
    ],
)
def test_other_errors(error: BaseException) -> None:
    assert as_peer_lost(error) is None


def test_peer_lost_stays_itself() -> None:
    lost = PeerLost("gone")
    assert as_peer_lost(lost) is lost


def test_a_peer_that_failed_is_silent_and_has_its_code() -> None:
    error = PeerFailed("no such column", failed_rank=2, exit_code=78)
    assert isinstance(error, CoremillError)
    assert (error.silent, error.exit_code, error.failed_rank, str(error)) == (True, 78, 2, "no such column")


class Store:
    """What ranks tell each other with, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.is_closed = False
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.values[key] = int(self.values.get(key, 0)) + amount
            return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return str(self.values[key])

    def check(self, keys: list[str]) -> bool:
        if self.is_closed:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.values for key in keys)


def world_of(store: Store, rank: int, size: int) -> world.World:
    identity = RankIdentity(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        node_rank=0,
        master_address="127.0.0.1",
        master_port=1,
        launcher="torchrun",
    )
    hosts = {"nodes": 1, "node_of_rank": (0,) * size, "hostnames": ("h",) * size, "node_rank": 0}
    return world.World(identity=identity, store=store, timeout_seconds=300, progress=None, **hosts)  # type: ignore[arg-type]


def refuse() -> None:
    raise InputError("no such column: text")


def test_a_rank_that_failed_says_why_though_its_launcher_ends_it_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "HEARING_SECONDS", 60.0)
    store = Store()

    def end_when_told() -> None:
        while not store.check(["once/1/failed"]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)  # some other rank's end; the last one has not heard yet

    with signals_lent(), pytest.raises(InputError, match="no such column"):
        thread = threading.Thread(target=end_when_told)
        thread.start()
        world_of(store, 0, 2).once_per_node(refuse)
    thread.join()


def test_ranks_that_heard_wait_for_those_that_have_not_and_for_the_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun and mpirun end all others with the first: were it one of these, nobody would say why."""
    monkeypatch.setattr(world, "FOLLOWING_SECONDS", 0.0)
    store, ended = Store(), []

    def run(rank: int) -> None:
        try:
            world_of(store, rank, 3).once_per_node(refuse)
        except CoremillError as error:
            time.sleep(0.5 if rank == 0 else 0)  # to say why, and to leave
            ended.append((rank, type(error)))
            store.is_closed |= rank == 0

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    while store.add("once/1/heard", 0) < 1:
        time.sleep(0.01)
    time.sleep(0.5)
    assert ended == []
    run(2)
    for thread in threads:
        thread.join()
    assert ended[0] == (0, InputError) and sorted(ended[1:]) == [(1, PeerFailed), (2, PeerFailed)]


def test_a_request_to_stop_is_not_told_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of torchrun have it, and leave without hearing anything: its grace is for saving."""
    monkeypatch.setattr(world, "HEARING_SECONDS", 600.0)
    monkeypatch.setattr(world, "HEARING_STOP_SECONDS", 0.1)
    with signals_lent(), pytest.raises(Stopped):
        world_of(Store(), 0, 2).once_per_node(lambda: signal.raise_signal(signal.SIGTERM))


def test_the_module_imports_no_torch() -> None:
    code = "import sys, coremill.world.group, coremill.supervise.ranks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_device_of_the_option_is_taken_unless_gloos_own_variable_says_more(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (Host(name="a", ranks=1, is_here=True), Host(name="b", ranks=1, is_here=False))
    request = Request(script="run/story.py", interface="eth7")
    here, there = node_commands(request, hosts, 1234, {"GLOO_SOCKET_IFNAME": "ib0,ib0"}, is_first=True)
    assert there.environ[INTERFACE] == here.environ[INTERFACE] == "eth7"
    identity = identify({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1234"})
    for name in ("GLOO_SOCKET_IFNAME", INTERFACE):
        monkeypatch.setenv(name, there.environ[name])
    assert world._device(identity) == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,ib0")
    assert world._device(identity) is None
