"""How much memory this process holds, and held at most: read from the kernel, not estimated."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def rss_bytes() -> int:
    """Resident memory now."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """The most that was resident since the start, or since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Start the peak anew from what is resident now; False where the kernel does not let us."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # not Linux: the peak is all there is

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
