"""How a rank tells its launcher that it lives and where it is: a few words of memory that both see.

The launcher makes a `HeartbeatBoard`, one slot per rank, in an anonymous file that ranks inherit; nothing of it lies on
a disk that may hang or fill. In the rank a thread counts beats, so that a stopped process is seen as one, and the work
itself leaves marks: its phase, its step, every micro-batch, whether it computes or waits for the others, and in work
that takes long (reading, hashing, fetching, saving, exporting) how many bytes of how many are done. A mark is a store
into memory, 0.3 us; a rank without a launcher of ours makes them into its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from coremill.files import anonymous_file

HEARTBEAT_FD = "COREMILL_PULSE_FD"  # DESCRIPTOR:SLOT
BEAT_SECONDS = 0.5
SLOT_WORDS = 13
_BEATS, _MARKS, _PHASE, _STEP, _STEPS_DONE, _WAITING, _SAVING_SINCE_NS, _FIRST_STEP = range(8)
_WORK, _WORK_DONE_BYTES, _WORK_TOTAL_BYTES, _SAVED_BYTES, _SAVE_TOTAL_BYTES = range(8, SLOT_WORDS)
# The order is what travels; `step` is the one phase in which progress is regular enough to be timed.
PHASES = ("start", "meet", "build", "load", "step", "evaluate", "save", "export", "finish", "other")
# What is counted in bytes, in the words of the screen; the first is none. Saves run beside it and are counted apart.
WORKS = (
    "",
    "checking the checkpoint",
    "fetching the checkpoint from other hosts",
    "reading the checkpoint",
    "reading weights",
    "making weights",
    "exporting",
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one rank said last."""

    beats: int  # counted by a thread: they stand still where the process does
    marks: int  # left by the work itself
    phase: str
    step: int  # the one it is in; 0 before the first
    first_step: int  # of this attempt; 0 before it
    steps_done: int
    is_waiting: bool  # for other ranks
    saving_since: float | None  # time.monotonic(), which all processes of a machine share
    work: str = ""  # of WORKS
    work_done_bytes: int = 0
    work_total_bytes: int = 0  # 0: not known
    saved_bytes: int = 0  # of the save under way, written so far
    save_total_bytes: int = 0


class HeartbeatBoard:
    """The launcher's end: one slot per local rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        size = ranks * SLOT_WORDS * 8
        self.descriptor = anonymous_file("coremill-heartbeat")  # for ranks to inherit
        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size)
        self._words = memoryview(self._map).cast("Q")

    def variable(self, local_rank: int) -> dict[str, str]:
        """What tells a rank where its slot is."""
        return {HEARTBEAT_FD: f"{self.descriptor}:{local_rank}"}

    def clear(self) -> None:
        """Forget the ranks of the attempt before; none of them may be left."""
        for index in range(len(self._words)):
            self._words[index] = 0

    def read(self, local_rank: int) -> Reading:
        return _reading(self._words[local_rank * SLOT_WORDS : (local_rank + 1) * SLOT_WORDS])

    def __enter__(self) -> HeartbeatBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self._words.release()
        self._map.close()
        os.close(self.descriptor)


class Heartbeat:
    """The rank's end. Until `begin` found a launcher it speaks to nobody, at the same cost."""

    def __init__(self) -> None:
        self._words = memoryview(bytearray(SLOT_WORDS * 8)).cast("Q")
        self._depth = 0
        self._thread: threading.Thread | None = None

    def begin(self, environ: Mapping[str, str]) -> bool:
        """Take the slot that the launcher left in the environment and beat from now on; False: there is none."""
        descriptor, _, slot = environ.get(HEARTBEAT_FD, "").partition(":")
        if self._thread is not None or not (descriptor.isdigit() and slot.isdigit()):
            return False
        try:
            board = mmap.mmap(int(descriptor), 0)
            os.close(int(descriptor))  # what this rank starts has no business with it
        except (OSError, ValueError):  # not our launcher's child after all
            return False
        size = SLOT_WORDS * 8
        words = memoryview(board)[int(slot) * size : (int(slot) + 1) * size].cast("Q")
        words[:] = self._words
        self._words = words
        self._thread = threading.Thread(target=self._beat, daemon=True, name="coremill-heartbeat")
        self._thread.start()
        return True

    def _beat(self) -> None:
        while True:
            self._words[_BEATS] += 1
            time.sleep(BEAT_SECONDS)

    def mark(self) -> None:
        self._words[_MARKS] += 1

    def step(self, step: int) -> None:
        self.enter("step")
        self._words[_STEP] = step
        if not self._words[_FIRST_STEP]:
            self._words[_FIRST_STEP] = step

    def step_done(self, step: int) -> None:
        self._words[_STEPS_DONE] = step
        self.mark()

    def enter(self, phase: str) -> None:
        self._words[_PHASE] = PHASES.index(phase) if phase in PHASES else len(PHASES) - 1
        self.mark()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The body is of this phase; afterwards the former one goes on."""
        former = self._words[_PHASE]
        self.enter(name)
        try:
            yield
        finally:
            self._words[_PHASE] = former
            self.mark()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The body waits for other ranks: it is they who are slow, not this one."""
        self._depth += 1
        self._words[_WAITING] = 1
        self.mark()
        try:
            yield
        finally:
            self._depth -= 1
            self._words[_WAITING] = int(self._depth > 0)
            self.mark()

    @contextlib.contextmanager
    def work(self, what: str, total_bytes: int) -> Iterator[None]:
        """The body does something that takes long; `advance` counts its bytes. Afterwards the former work goes on."""
        names = slice(_WORK, _WORK_TOTAL_BYTES + 1)
        former = self._words[names].tolist()
        self._put_work(WORKS.index(what), 0, total_bytes)
        try:
            yield
        finally:
            self._put_work(*former)

    def _put_work(self, work: int, done_bytes: int, total_bytes: int) -> None:
        self._words[_WORK] = work
        self._words[_WORK_DONE_BYTES], self._words[_WORK_TOTAL_BYTES] = done_bytes, total_bytes
        self.mark()

    def advance(self, count_bytes: int) -> None:
        self._words[_WORK_DONE_BYTES] += count_bytes
        self.mark()

    @contextlib.contextmanager
    def saving(self, total_bytes: int = 0) -> Iterator[None]:
        """The body writes a checkpoint, perhaps in the background: storage has a deadline of its own."""
        self._words[_SAVED_BYTES], self._words[_SAVE_TOTAL_BYTES] = 0, total_bytes
        self._words[_SAVING_SINCE_NS] = time.monotonic_ns()
        try:
            yield
        finally:
            self._words[_SAVING_SINCE_NS] = 0

    def saved(self, count_bytes: int) -> None:
        self._words[_SAVED_BYTES] += count_bytes

    def not_saving(self) -> None:
        """The save was given up: what still hangs in the storage is no longer waited for."""
        self._words[_SAVING_SINCE_NS] = 0

    def reading(self) -> Reading:
        """What this rank said last, for itself: under a foreign launcher nobody else reads it."""
        return _reading(self._words)


HEARTBEAT = Heartbeat()


def _reading(words: memoryview) -> Reading:
    since = words[_SAVING_SINCE_NS]
    return Reading(
        beats=words[_BEATS],
        marks=words[_MARKS],
        phase=PHASES[min(words[_PHASE], len(PHASES) - 1)],
        step=words[_STEP],
        first_step=words[_FIRST_STEP],
        steps_done=words[_STEPS_DONE],
        is_waiting=bool(words[_WAITING]),
        saving_since=since / 1e9 if since else None,
        work=WORKS[words[_WORK]],
        work_done_bytes=words[_WORK_DONE_BYTES],
        work_total_bytes=words[_WORK_TOTAL_BYTES],
        saved_bytes=words[_SAVED_BYTES],
        save_total_bytes=words[_SAVE_TOTAL_BYTES],
    )
