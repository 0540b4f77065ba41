"""How launchers wait for processes. They share the cores that ranks compute on: the kernel tells them of an end, and
they do not look for one twenty times a second. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable

LOOK_AGAIN_SECONDS = 0.05  # where the kernel does not tell


def sleep_unless_ended(pids: Iterable[int], seconds: float) -> bool:
    """At most so long; less where one of these processes ends, or has ended and nobody has waited for it yet.

    Whether one is known to have."""
    ends = select.poll()
    with contextlib.ExitStack() as opened:
        try:
            for pid in pids:
                ends.register(end_of(pid, opened), select.POLLIN)
        except (AttributeError, OSError):  # not Linux, or one before 5.3
            time.sleep(min(seconds, LOOK_AGAIN_SECONDS))
            return False
        return bool(ends.poll(1000 * seconds))


def end_of(pid: int, opened: contextlib.ExitStack) -> int:
    """A descriptor that can be read once the process has ended, until `opened` is closed."""
    descriptor = os.pidfd_open(pid)
    opened.callback(os.close, descriptor)
    return descriptor
