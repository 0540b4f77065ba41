"""How much memory this process holds, and held at most: read from the kernel, not estimated.

Resident memory is a process's own, and pages of files that the kernel mapped from its cache: libraries above all. These
it takes back when memory gets short, and how many it maps depends on how the files came into its cache: 75 MB in a rank
whose libraries were read long ago, 147 after a fresh installation, with the same 280 MB of its own.
"""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

# Pages of files in a rank that trains, as plans count them (73 to 77 MB in ranks of 10 and 60 M parameters, x86_64,
# torch 2.13): measured along with the rest, they would make every plan as uncertain as the cache.
MAPPED_FILE_BYTES = 80_000_000

# What ranks find in their environment: memory freed within a step stays with the allocator (glibc, mimalloc) for the
# next one, in huge pages where the kernel gives them to who asks.
KEEPS_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**46),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MIMALLOC_PURGE_DELAY": "-1",
}


# Of memory that ranks of a host have in common: what others filled and is counted with them (`count_shared`).
_filled_by = {"this rank": 0, "others": 0}


def count_shared(own_bytes: int, others_bytes: int) -> None:
    """From now on, count shared memory with the rank that fills it: here so much, elsewhere so much of the same."""
    _filled_by["this rank"] += own_bytes
    _filled_by["others"] += others_bytes


def rss_bytes() -> int:
    return _status_bytes("VmRSS") - _counted_elsewhere_bytes()


def peak_rss_bytes() -> int:
    """The most that was resident since the start, or since `reset_peak`."""
    return _status_bytes("VmHWM") - _counted_elsewhere_bytes()


def _counted_elsewhere_bytes() -> int:
    if not _filled_by["others"]:
        return 0
    return max(0, min((_field_bytes("RssShmem") or 0) - _filled_by["this rank"], _filled_by["others"]))


def mapped_file_bytes() -> int:
    """What of the resident memory are pages of files; 0 where the kernel does not say."""
    return _field_bytes("RssFile") or 0


def own_bytes() -> int:
    """What the kernel cannot take back: all that is resident but pages of files."""
    return rss_bytes() - mapped_file_bytes()


def memory_now() -> dict[str, int]:
    """The fields of an event that tell of memory."""
    return {"rss_bytes": rss_bytes(), "peak_rss_bytes": peak_rss_bytes(), "mapped_file_bytes": mapped_file_bytes()}


def reset_peak() -> bool:
    """Start the peak anew from what is resident now; False where the kernel does not let us."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    found = _field_bytes(field)
    if found is not None:
        return found
    import resource  # not Linux: the peak is all there is

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _field_bytes(field: str) -> int | None:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
