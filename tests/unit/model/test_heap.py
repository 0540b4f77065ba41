"""Holes of the heap go back where a large block is about to be made, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from coremill.model import heap
from coremill.supervise.rank_environment import KEEP_MEMORY

# Blocks of a megabyte, every second one freed: holes that cannot join, in a heap that is told to keep what is freed.
PROGRAM = """
import ctypes, json
from coremill.model.heap import Backward, LARGE_BYTES, give_back_freed

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
blocks = [libc.malloc(2**20) for _ in range(200)]
for block in blocks:
    libc.memset(block, 1, 2**20)
full = resident()
for block in blocks[::2]:
    libc.free(block)
kept = resident()
give_back_freed(LARGE_BYTES - 1)
small = resident()
backward = Backward(every_bytes=LARGE_BYTES)
backward.lays_out(LARGE_BYTES // 2)
early = resident()
backward.lays_out(LARGE_BYTES // 2)
print(json.dumps([full, kept, small, early, resident()]))
"""


@pytest.mark.skipif(heap._malloc_trim() is None, reason="the C library has no malloc_trim")
def test_holes_go_back_when_it_is_worth_it() -> None:
    environment = os.environ | {setting.variable: setting.value for setting in KEEP_MEMORY}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    full, kept, small, early, late = json.loads(done.stdout)
    mib = 2**20
    assert kept > full - 10 * mib  # the allocator keeps what was freed: else there is nothing to show here
    assert small > full - 10 * mib  # a small block is not worth it
    assert early > full - 10 * mib  # nor is the first layer of a backward pass
    assert late < full - 80 * mib


def test_a_large_gradient_is_always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(heap, "give_back_freed", asked.append)
    large = heap.LARGE_BYTES
    backward = heap.Backward(every_bytes=3 * large)
    for nbytes in (large - 1, large - 1, large, large - 1):
        backward.lays_out(nbytes)
    assert asked == [3 * large - 2]  # before the large one, though less than `every_bytes` was laid out


def test_a_small_model_never_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(heap, "give_back_freed", asked.append)
    backward = heap.Backward(every_bytes=100)
    for _ in range(10):  # steps
        backward.lays_out(60)
        backward.ended()
    assert asked == []
