"""Gloo's threads do not interrupt compute threads.

Ranks give all their cores to arithmetic, and gloo's threads wake for every few packets. Under the kernel's usual policy
each time one of them takes the core at once, and the product it broke into finds its caches gone. As batch threads they
have the same share of the core, but wait for the end of a compute thread's slice, a few milliseconds, and then find
more to do; a core that idles they take at once, as ever.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

GLOO_THREADS = "gloo"  # what their names begin with


def let_compute_finish() -> int:
    """Make all of gloo's threads in this process batch threads; returns how many there were."""
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    found = 0
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it
            if (task / "comm").read_text().startswith(GLOO_THREADS):
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
                found += 1
    return found
