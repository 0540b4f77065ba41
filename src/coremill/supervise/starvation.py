"""How long processes stood in the queue for a CPU: a rank that is not let on is not one that hangs.

The kernel counts per thread (`/proc/PID/task/TID/schedstat`, second number, nanoseconds): time ready to run but not
running, because others ran or because a cgroup's quota was spent. Where it does not tell, nobody is ever starved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


class Starvation:
    """Asked now and then about some processes, it says how long each waited for a CPU since it was last asked."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._waited: dict[int, dict[str, int]] = {}

    def seconds_since(self, pids: Iterable[int]) -> dict[int, float]:
        """Of the thread that waited longest; 0 for a process asked about for the first time. Others are forgotten."""
        former, self._waited = self._waited, {pid: self._read(pid) for pid in pids}
        starved = {}
        for pid, threads in self._waited.items():
            before = former.get(pid, {})
            waits = [nanoseconds - before[thread] for thread, nanoseconds in threads.items() if thread in before]
            starved[pid] = max(waits, default=0) / 1e9
        return starved

    def _read(self, pid: int) -> dict[str, int]:
        threads = {}
        with contextlib.suppress(OSError):  # it ended meanwhile
            for task in (self._proc / str(pid) / "task").iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    threads[task.name] = int((task / "schedstat").read_text().split()[1])
        return threads
