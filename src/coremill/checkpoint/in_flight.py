"""One save under way on one rank: who may say how it ended, and how ranks wait for each other's word."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coremill.checkpoint.snapshot import Snapshot

POLL_SECONDS = 0.02
SLOWEST_POLL_SECONDS = 0.5


@dataclass
class Save:
    """One save under way on this rank."""

    number: int
    step: int
    snapshot: Snapshot
    state: dict[str, Any]
    began: float
    limit_seconds: float
    given_up: bool = False
    _decided: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self) -> bool:
        """True for the one who may say how it ended: the thread that wrote it, or whoever gave it up before."""
        with self._lock:
            first, self._decided = not self._decided, True
        return first

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.began

    @property
    def outcome_key(self) -> str:
        """Where rank 0 says how it ended."""
        return f"save/{self.number}/outcome"


class GivenUp(Exception):
    """The save was given up while it was written."""


def gave_up(save: Save) -> str:
    """Why it counts as failed."""
    return f"the storage did not take it within {save.limit_seconds:.0f} s (supervise.save_deadline)"


def wait_for(store: Any, keys: Sequence[str], save: Save, *, or_else: str | None = None) -> None:
    """Until all keys are there, or the other one. It polls: a blocking wait would hold the store's lock against the
    main thread."""
    pause = POLL_SECONDS
    left = list(keys)
    while left:
        if or_else is not None and store.check([or_else]):
            return
        left = [key for key in left if not store.check([key])]
        if left and save.given_up:
            raise GivenUp
        if left:
            time.sleep(pause)
            pause = min(pause * 1.5, SLOWEST_POLL_SECONDS)


def words(error: Exception) -> str:
    """What an error of the storage says."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)
