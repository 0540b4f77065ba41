"""A slot of shared memory: what leaves a rank's resident memory is still there for all."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

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
