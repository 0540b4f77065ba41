"""One save under way on one rank: does training wait for it, how long it may take, who may say how it ended, how ranks
wait for each other, and what a run that stopped says of its last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coremill.checkpoint.snapshot import Snapshot
from coremill.config.durations import seconds_of
from coremill.config.schema import AUTO, RunConfig
from coremill.errors import Stopped, StorageError
from coremill.plan.saving import GRACE_SECONDS, SHARE_OF_GRACE, STANDING_SECONDS
from coremill.plan.types import Choice, MemoryPlan

POLL_SECONDS = 0.02
SLOWEST_POLL_SECONDS = 0.5
# For the rename and what comes after it, however short a deadline is: from there on a save cannot be given up.
END_SECONDS = 120.0
# Where all ranks add up what they have written, in all saves: it only grows, and no key is left behind by a save.
WRITTEN_BYTES_KEY = "save/bytes"


def choose_save_mode(memory: MemoryPlan, copy_bytes: int) -> Choice[str]:
    """Whether a copy of this rank's state fits beside everything else, so that training need not wait for the disk."""
    room = memory.limit - memory.steady_step.total
    size = f"a copy of a rank's state ({copy_bytes / 1e9:.2f} GB) "
    beside = f"the {max(0, room) / 1e9:.2f} GB that training leaves of the memory limit"
    if copy_bytes <= room:
        return Choice("background", f"{size}fits into {beside}")
    return Choice("streamed", f"{size}does not fit into {beside}, so training waits while it is written")


@dataclass(frozen=True)
class SaveDeadline:
    """When a save counts as one that hangs in the storage."""

    seconds: float
    setting: str | None = None  # the key that says so, and then from its beginning; None: while nobody writes a byte

    @property
    def words(self) -> str:
        """Why a save that took longer counts as failed."""
        if self.setting is None:
            return f"the storage took nothing of it for {self.seconds:.0f} s"
        return f"the storage did not take it within {self.seconds:.0f} s ({self.setting})"


def save_deadline_of(config: RunConfig, *, is_stop: bool = False) -> SaveDeadline:
    """How long a save may take: as the user set it, else as long as bytes go to the storage."""
    named: list[SaveDeadline] = []
    if config.supervise.save_deadline != AUTO:
        named.append(SaveDeadline(seconds_of(config.supervise.save_deadline), "supervise.save_deadline"))
    if is_stop and config.checkpoint.grace != AUTO:
        named.append(SaveDeadline(SHARE_OF_GRACE * seconds_of(config.checkpoint.grace), "checkpoint.grace"))
    standing = SaveDeadline(SHARE_OF_GRACE * GRACE_SECONDS if is_stop else STANDING_SECONDS)
    return min(named, key=lambda each: each.seconds, default=standing)


@dataclass
class Save:
    """One save under way on this rank."""

    number: int
    step: int
    snapshot: Snapshot
    state: dict[str, Any]
    began: float
    deadline: SaveDeadline
    written_bytes: int  # by all ranks in all saves, as far as this rank has heard
    given_up: bool = False
    _decided: Literal["", "written", "given up"] = ""
    _decided_at: float = 0.0
    _told: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _got_on_at: float = field(default_factory=time.perf_counter)

    def decide(self, how: Literal["written", "given up"]) -> bool:
        """Whether this is how it ends: the thread that writes it says one, who gives it up the other; the first counts.

        With one place rank 0's thread says so right before the rename: what was given up is never renamed, and what may
        be renamed is never given up.
        """
        with self._lock:
            if not self._decided:
                self._decided, self._decided_at = how, time.perf_counter()
            return self._decided == how

    def first_to_tell(self) -> bool:
        """True for the one who says how it ended, of the two threads that know."""
        with self._lock:
            first, self._told = not self._told, True
        return first

    @property
    def is_told(self) -> bool:
        """How it ended is known here; what its thread still does is to tidy up."""
        return self._told

    def hear(self, written_bytes: int) -> bool:
        """What all ranks have written by now; whether that is more than it was."""
        if written_bytes == self.written_bytes:
            return False
        self.written_bytes, self._got_on_at = written_bytes, time.perf_counter()
        return True

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def is_late(self) -> bool:
        """As far as this rank has heard of the others."""
        since = self._got_on_at if self.deadline.setting is None else self.began
        return time.perf_counter() - since > self.deadline.seconds

    @property
    def hangs_in_the_end(self) -> bool:
        """Nobody may give it up any more, but the rename, or tidying up after it, does not return."""
        deadline_seconds = max(END_SECONDS, self.deadline.seconds)
        return self._decided == "written" and time.perf_counter() - self._decided_at > deadline_seconds

    @property
    def outcome_key(self) -> str:
        """Where rank 0 says how it ended."""
        return f"save/{self.number}/outcome"


class GivenUp(Exception):
    """The save was given up while it was written."""


class WrittenBytes:
    """Tells the other ranks, now and then, how far this rank's file is."""

    EVERY_SECONDS = 1.0

    def __init__(self, store: Any) -> None:
        self._store = store
        self._untold, self._told_at = 0, time.perf_counter()

    def add(self, count: int) -> None:
        self._untold += count
        if time.perf_counter() - self._told_at >= self.EVERY_SECONDS:
            self._store.add(WRITTEN_BYTES_KEY, self._untold)
            self._untold, self._told_at = 0, time.perf_counter()


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


def error_text(error: Exception) -> str:
    """What an error of the storage says."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)


def stopped_after(step: int | None, folder: Path) -> Stopped:
    """A run that stopped on request with this step saved; None: before one was done."""
    if step is None:
        return Stopped("stopped on request before a step was done", do="the same command goes on from there")
    return Stopped(
        f"stopped on request after step {step}, which is saved",
        where=str(folder),
        do="the same command goes on from there",
    )


def stopped_unsaved(step: int, folder: Path, why: str | None, last_saved: int) -> StorageError:
    """The same where the storage did not take the step."""
    return StorageError(
        f"stopped on request after step {step}, which could not be saved",
        where=str(folder),
        why=why,
        do=f"the same command goes on after step {last_saved}",
    )
