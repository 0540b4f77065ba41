"""Freed memory back to the kernel, at the two moments of a step that need most: before the loss of a model with a large
table (its embedding or head), and before that table's gradient is laid out for the other ranks.

Ranks keep what they free (launch/environment.py), and an aligned block seldom fits where glibc freed an equal one: a
quarter of a large model's heap is holes. What is laid beside them makes a step's peak. Given back at these moments
only, holes are faulted in anew at most twice a step.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

# Below this, what is laid beside the holes is small, and faulting them in again is felt in a short step.
LARGE_BYTES = 2**27


def give_back_freed(needed_bytes: int) -> None:
    """All pages of the heap that nothing lies in, before a block of that size is made; nothing where it is small."""
    trim = _malloc_trim()
    if trim is not None and needed_bytes >= LARGE_BYTES:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; None under another C library. Where another allocator is preloaded it finds nothing to give back."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
