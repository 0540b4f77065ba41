"""Telling lost peers from other errors; the world itself is tested on real ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coremill.errors import CoremillError, PeerLost
from coremill.hosts.ssh import Host
from coremill.launch.node_command import node_commands
from coremill.launch.request import Request
from coremill.world import group as world
from coremill.world.group import PeerFailed
from coremill.world.identity import INTERFACE, identify
from coremill.world.lost_peers import as_peer_lost


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
