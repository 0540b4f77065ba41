"""What names prepared data in the cache: a hash of the text it was made of, told while it is made; and whether the
files stayed as they were."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from coremill.data.packed import Progress
from coremill.data.sources import TextSource, identity_of, stamps_of
from coremill.errors import InputError

HASH_PROGRESS_SECONDS = 0.1
Stamps = tuple[tuple[int, int], ...]


def hash_of(*parts: object) -> str:
    """One name of many parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def told_identity(source: TextSource, stamps: Stamps, progress: Callable[[Progress], None]) -> str:
    """`identity_of` a source, with progress where it takes a while."""
    total = sum(size for size, _ in stamps)
    done, told, last_told = 0, False, time.perf_counter()

    def on_bytes(count: int) -> None:
        nonlocal done, told, last_told
        done += count
        if time.perf_counter() - last_told >= HASH_PROGRESS_SECONDS:
            told, last_told = True, time.perf_counter()
            progress(Progress(0, done, total, 0, "hash"))

    identity = identity_of(source, on_bytes)
    if told:
        progress(Progress(0, total, total, 0, "hash", is_done=True))
    return identity


def require_unchanged(source: TextSource, stamps: Stamps) -> None:
    """Refuse what was made of files that somebody wrote to meanwhile."""
    if stamps_of(source) != stamps:
        raise InputError(
            "the files changed while they were read",
            where=source.where,
            why="what was packed belongs to neither the old nor the new text",
            do="run again once nothing writes to them",
        )
