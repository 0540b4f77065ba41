"""Telling a rank the kernel killed for memory from one that somebody killed: both end by SIGKILL."""

from __future__ import annotations

from pathlib import Path

from coremill.hardware.cgroup import read_cgroup_limits, read_cgroup_memory


def memory_kills(root: Path = Path("/")) -> int:
    """Processes the out-of-memory killer has ended so far, in this cgroup where it counts, else on this machine.

    Ranks live in the cgroup of their launcher. The machine's own counter (since boot) counts all processes, but is
    there where cgroups do not tell: at their root, and in version 1 before kernel 4.13.
    """
    counted = read_cgroup_memory(root).kills
    if counted is not None:
        return counted
    try:
        lines = (root / "proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def memory_note(kills: int, *, rank_peak_bytes: int | None = None, planned_bytes: int | None = None) -> str:
    """What to add about a rank ended by SIGKILL, where the kernel counted `kills` meanwhile: limit, peak and plan."""
    if kills <= 0:
        return ""
    limit, peak = read_cgroup_limits().memory_limit_bytes, read_cgroup_memory().peak_bytes
    facts = (
        ("the limit here is {}", limit),
        ("all processes under it together reached {}", peak),
        ("this rank had reached {}", rank_peak_bytes),
        ("the plan was {} per rank", planned_bytes),
    )
    known = "".join(f"; {words.format(f'{size / 1e9:.2f} GB')}" for words, size in facts if size)
    return f": out of memory (the kernel killed {kills} for it during the run{known})"
