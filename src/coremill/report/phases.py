"""A phase of a rank's life as an event: how long it took and how much memory it needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from coremill.hardware.process_memory import memory_now, reset_peak, rss_bytes
from coremill.report.events import EventWriter
from coremill.world.heartbeat import HEARTBEAT


@contextmanager
def phase(events: EventWriter, name: str) -> Iterator[int]:
    """Time the body and note its peak; yields what was resident before it."""
    reset_peak()
    before, began = rss_bytes(), time.perf_counter()
    with HEARTBEAT.phase(name):
        yield before
    seconds = time.perf_counter() - began
    events.write("phase", name=name, seconds=seconds, **memory_now())
