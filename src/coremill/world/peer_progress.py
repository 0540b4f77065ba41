"""How long a rank waits for the others: as long as any of them gets on, however long that takes.

A collective of gloo's ends after a fixed time, however hard the rank it waits for works: reading a checkpoint of 96 GB
or writing an export takes longer than any time that is good for noticing a dead peer. So gloo's own limit is put out of
the way, and every rank whose work left marks (world/heartbeat.py) since it was last asked adds one to a number in the
store. A rank that waits while that number stands still for the timeout shuts its connections, and what it waited in
raises. One number for all, since 400 ranks that each read 400 would be a load.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from coremill.world.heartbeat import HEARTBEAT
from coremill.world.lost_peers import give_peers_up
from coremill.world.meeting import beats_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

KEY = "progress"
LOOKS_PER_TIMEOUT = 20
SELDOMEST_LOOK_SECONDS = 5.0


class PeerProgress:
    """Two threads of one rank: one counts in the store, which may hang with the rank that serves it; one has a clock.

    Use as a context; `shut` closes this rank's connections, from the thread with the clock.
    """

    def __init__(self, store: Store, rank: int, timeout_seconds: float, shut: Callable[[], None]) -> None:
        self._store, self._rank, self.timeout_seconds, self._shut = store, rank, timeout_seconds, shut
        self._look_seconds = min(SELDOMEST_LOOK_SECONDS, timeout_seconds / LOOKS_PER_TIMEOUT)
        self._clock = 0.0  # does not run while this process is stopped, or its machine asleep
        self._progress_at = 0.0
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"coremill-{name}")
            for name, target in (("progress", self._count), ("peers", self._watch))
        ]

    def __enter__(self) -> PeerProgress:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)  # one that hangs with the store is left to its end with the sockets

    def standing_seconds(self) -> float:
        """Since any rank got on, as far as this one has heard."""
        return self._clock - self._progress_at

    def _count(self) -> None:
        own, total = -1, -1
        with contextlib.suppress(RuntimeError):  # the store is gone: whatever this rank does next says so
            while not self._ended.wait(self._look_seconds):
                reading = HEARTBEAT.reading()
                now = reading.marks + reading.saved_bytes
                heard = self._store.add(KEY, int(now != own))
                self._store.add(
                    beats_of(self._rank), 1
                )  # for a second process of this rank, which may be its successor
                own = now
                if heard != total:
                    total, self._progress_at = heard, self._clock

    def _watch(self) -> None:
        looked_at, waiting_since = time.monotonic(), 0.0
        while not self._ended.wait(self._look_seconds):
            now = time.monotonic()
            self._clock += min(now - looked_at, 2 * self._look_seconds)
            looked_at = now
            if not HEARTBEAT.reading().is_waiting:
                waiting_since = self._clock
            if self._clock - max(waiting_since, self._progress_at) > self.timeout_seconds:
                self._ended.set()  # nobody counts in a store that is shut
                give_peers_up(self.timeout_seconds)
                self._shut()
                return
