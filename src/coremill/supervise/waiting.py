"""The one way in which launchers and agents wait. They share the cores that ranks compute on: the kernel tells them of
an end, and they do not look for one twenty times a second. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable
from typing import Literal

LOOK_AGAIN_SECONDS = 0.05  # where the kernel does not tell


def wait_for_end(
    pids: Iterable[int], seconds: float, *, or_input: int | None = None
) -> Literal["ended", "input"] | None:
    """At most so long; less where one of these children ends, or has ended and nobody has waited for it yet, or where
    the descriptor `or_input` can be read or is closed at its other end. Says which of these it was, input first."""
    events = select.poll()
    if or_input is not None:
        events.register(or_input, select.POLLIN)
    with contextlib.ExitStack() as opened:
        try:
            for pid in pids:
                descriptor = os.pidfd_open(pid)
                opened.callback(os.close, descriptor)
                events.register(descriptor, select.POLLIN)
        except (AttributeError, OSError):  # not Linux, or one before 5.3
            seconds = min(seconds, LOOK_AGAIN_SECONDS)
        happened = {descriptor for descriptor, _ in events.poll(1000 * seconds)}
    if or_input in happened:
        return "input"
    return "ended" if happened else None
