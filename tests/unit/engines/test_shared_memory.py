"""A slot of shared memory: what leaves a rank's resident memory is still there for all."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.engines.one_host import shared_memory
from coremill.engines.one_host.shared_memory import Slot

PAGES = 64


def _resident_shared_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssShmem line")


def test_what_others_filled_is_unmapped_and_not_lost() -> None:
    length = PAGES * mmap.PAGESIZE
    file = os.memfd_create("test")
    os.ftruncate(file, length)
    own = slice(16 * mmap.PAGESIZE + 100, 32 * mmap.PAGESIZE + 100)  # not on page borders
    slot = Slot(0, length, mmap.mmap(file, length), own)
    slot.map[:] = bytes(range(256)) * (length // 256)
    before = _resident_shared_bytes()
    slot.unmap_others()
    unmapped = before - _resident_shared_bytes()
    assert unmapped == (PAGES - 17) * mmap.PAGESIZE  # its own reach into 17, which are kept whole
    assert slot.map[:] == bytes(range(256)) * (length // 256)
    slot.map.close()
    os.close(file)


def test_a_rank_that_hangs_up_while_ranks_meet_is_a_reason_and_no_crash() -> None:
    listener = shared_memory._listen(1)
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.connect(listener.getsockname())
    caller.close()
    world: Any = SimpleNamespace()
    with listener, pytest.raises(OSError, match="a rank hung up"):
        shared_memory._connect(world, 0, listener, ["this one", "the caller"])


def test_a_first_rank_that_can_make_no_memory_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is everybody's, long before the others' time is over."""

    def fail(*_: object) -> None:
        raise OSError(errno.EFBIG, "too large")

    monkeypatch.setattr(os, "ftruncate", fail)
    ranks = 3
    everyone, said = threading.Barrier(ranks, timeout=shared_memory.MEETING_SECONDS / 2), [None] * ranks

    def world(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            everyone.wait()
            said[rank] = value
            everyone.wait()
            return list(said)

        return SimpleNamespace(rank=rank, nodes=1, hostnames=("h",) * ranks, gather=gather)

    with ThreadPoolExecutor(ranks) as pool:
        met = list(pool.map(lambda rank: shared_memory.meet_host_peers(world(rank)), range(ranks)))
    assert met == ["rank 0 cannot share memory with the others: [Errno 27] too large"] * ranks
