"""Freed memory back to the kernel, at the moments of a step that need most.

Ranks keep what they free (rank_environment.py), and an aligned block seldom fits where glibc freed an equal one: a
quarter of a large model's heap is holes. What is laid beside them makes a step's peak: the loss of a model with a large
table (its embedding or head), the gradients that backward leaves behind, that table's gradient laid out for the other
ranks. Given back at these moments only, holes are faulted in anew a few times a step, not with every layer.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

# What is worth it: below, faulting holes in again is felt in a short step (8 % of one of 512 tokens, 196 M parameters
# and a table of 134 MB on two Skylake cores, for 6 % of the memory; one go each).
LARGE_BYTES = 2**28


def give_back_freed(needed_bytes: int) -> None:
    """All pages of the heap that nothing lies in, before a block of that size is made; nothing where it is small."""
    trim = _malloc_trim()
    if trim is not None and needed_bytes >= LARGE_BYTES:
        trim(0)


class Backward:
    """Gives back every so often while gradients take the place of activations."""

    def __init__(self, every_bytes: int = 2 * LARGE_BYTES) -> None:
        self._every_bytes = every_bytes
        self._since_bytes = 0

    def lays_out(self, nbytes: int) -> None:
        """A gradient of that size leaves: a large one is worth it by itself."""
        self._since_bytes += nbytes
        if nbytes >= LARGE_BYTES or self._since_bytes >= self._every_bytes:
            give_back_freed(self._since_bytes)
            self._since_bytes = 0

    def ended(self) -> None:
        """Backward is through. A model whose gradients never come to that much keeps its heap, huge pages and all: what
        is given back in between them leaves small pages behind."""
        self._since_bytes = 0


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; None under another C library. Where another allocator is preloaded it finds nothing to give back."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
