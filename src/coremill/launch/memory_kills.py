"""Telling a rank the kernel killed for memory from one that somebody killed: both end by SIGKILL."""

from __future__ import annotations

from pathlib import Path

from coremill.hardware.cgroup import read_cgroup_limits


def memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Processes the out-of-memory killer has ended on this machine since it booted, by cgroup limit or for lack of RAM.

    Not hidden by containers, unlike the counters of their cgroups above them.
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def memory_note(kills: int) -> str:
    """What to add about a rank ended by SIGKILL, where the kernel counted `kills` meanwhile."""
    if kills <= 0:
        return ""
    limit = read_cgroup_limits().memory_limit_bytes
    bound = f"; the limit here is {limit / 1e9:.1f} GB" if limit is not None else ""
    return f": out of memory (the kernel killed {kills} for it during the run{bound})"
