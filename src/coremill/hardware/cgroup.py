"""What the cgroups on the path from this process up to the root allow: CPU quota and memory, versions 1 and 2.

A limit anywhere above binds everything below, so every level that can be seen is read and the smallest value counts.
Containers differ in how much of the path they see: with a cgroup namespace the process stands at `/`, without one the
path of the host is shown while the mount already begins at the container. Both forms end at a folder under a mount.
A cpuset that keeps memory to some NUMA nodes limits it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coremill.hardware.topology import parse_cpu_list, text_of

Number = TypeVar("Number", int, float)

# Version 1 writes "no limit" as the largest number of whole pages (about 2**63); no machine has an exbibyte.
_NO_LIMIT_FROM_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class CgroupLimits:
    """The smallest limits on the path; None where no level sets one."""

    cpu_quota: float | None  # CPUs
    memory_limit_bytes: int | None
    memory_free_bytes: int | None  # what the tightest level still grants, its reclaimable file cache counted as free


@dataclass(frozen=True)
class _Mount:
    """One cgroup file system: which part of the hierarchy it shows, and where."""

    version: int
    controllers: frozenset[str]  # empty for version 2, which has one hierarchy for all
    shown_root: str
    folder: Path


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits that hold for this process (root: where /proc and /sys are)."""
    paths = _paths_of_process(root)
    quotas: list[float] = []
    limits: list[int] = []
    free: list[int] = []
    for mount in _mounts(root):
        for level in _levels(mount, paths):
            if mount.version == 2:
                _keep(quotas, _quota_v2(level))
                _memory_level(level, ("memory.max", "memory.high"), "memory.current", "inactive_file", limits, free)
                continue
            if "cpu" in mount.controllers:
                _keep(quotas, _quota_v1(level))
            if "memory" in mount.controllers:
                _memory_level(
                    level, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file", limits, free
                )
                # The kernel's own minimum over all ancestors, those outside the container included.
                _keep(limits, _bounded(_stat_value(level / "memory.stat", "hierarchical_memory_limit")))
    if (allowed := _memory_of_allowed_nodes(root)) is not None:
        limits.append(allowed[0])
        free.append(allowed[1])
    return CgroupLimits(
        cpu_quota=min(quotas, default=None),
        memory_limit_bytes=min(limits, default=None),
        memory_free_bytes=min(free, default=None),
    )


@dataclass(frozen=True, kw_only=True)
class CgroupMemory:
    """What the cgroup of this process counted; None where the kernel does not say."""

    kills: int | None  # processes in it that the out-of-memory killer ended, whichever level's limit it was
    peak_bytes: int | None  # the most it ever held, file cache included, at the level whose limit is smallest


def read_cgroup_memory(root: Path = Path("/")) -> CgroupMemory:
    """The counters of the cgroup this process is in (root: where /proc and /sys are)."""
    paths = _paths_of_process(root)
    kills: int | None = None
    peaks: list[tuple[int, int]] = []
    for mount in _mounts(root):
        if mount.version == 1 and "memory" not in mount.controllers:
            continue
        counter, peak, limit = (
            ("memory.events", "memory.peak", "memory.max")
            if mount.version == 2
            else ("memory.oom_control", "memory.max_usage_in_bytes", "memory.limit_in_bytes")
        )
        for number, level in enumerate(_levels(mount, paths)):
            if number == 0 and (counted := _stat_value(level / counter, "oom_kill")) is not None:
                kills = counted
            bound, highest = _bounded(_number(level / limit)), _number(level / peak)
            if bound is not None and highest is not None:
                peaks.append((bound, highest))
    return CgroupMemory(kills=kills, peak_bytes=min(peaks)[1] if peaks else None)


def _mounts(root: Path) -> list[_Mount]:
    """The cgroup mounts from mountinfo, or the usual places where that cannot be read."""
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not separator or len(fields) < 5 or not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        options = frozenset(kind[2].split(",")) if len(kind) > 2 else frozenset()
        version = 2 if kind[0] == "cgroup2" else 1
        folder = root / _unescape(fields[4]).lstrip("/")
        found.append(_Mount(version, options if version == 1 else frozenset(), _unescape(fields[3]), folder))
    if found:
        return found
    base = root / "sys/fs/cgroup"
    if (base / "cgroup.controllers").exists():
        return [_Mount(2, frozenset(), "/", base)]
    names = ("cpu", "cpu,cpuacct", "memory")
    return [_Mount(1, frozenset(name.split(",")), "/", base / name) for name in names if (base / name).is_dir()]


def _unescape(field: str) -> str:
    """mountinfo writes blanks and the like as octal escapes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _paths_of_process(root: Path) -> dict[str, str]:
    """Controller name to path; the one hierarchy of version 2 has the empty name."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3:
            paths.update(dict.fromkeys(parts[1].split(","), parts[2]))
    return paths


def _levels(mount: _Mount, paths: dict[str, str]) -> Iterator[Path]:
    """The folders from this process's cgroup up to the mount point."""
    name = "" if mount.version == 2 else next((name for name in sorted(mount.controllers) if name in paths), None)
    path = paths.get(name, "/") if name is not None else "/"
    shown = mount.shown_root.rstrip("/")
    if shown and (path == shown or path.startswith(shown + "/")):
        path = path[len(shown) :]
    inside = [part for part in path.split("/") if part and part != ".."]  # "..": outside of our namespace, not visible
    folder = mount.folder.joinpath(*inside)
    if not folder.is_dir():  # the host's path, on a mount that begins at the container
        inside, folder = [], mount.folder
    yield folder
    for _ in inside:
        folder = folder.parent
        yield folder


def _memory_of_allowed_nodes(root: Path) -> tuple[int, int] | None:
    """Of the NUMA nodes whose memory a cpuset allows: all of it, and what is free; None where it allows all nodes."""
    line = next((line for line in _lines(root / "proc/self/status") if line.startswith("Mems_allowed_list:")), "")
    allowed = set(parse_cpu_list(line.partition(":")[2]))
    nodes = {
        int(folder.name.removeprefix("node")): _node_memory(folder / "meminfo")
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    if not allowed or allowed >= {number for number, memory in nodes.items() if memory.get("MemTotal")}:
        return None
    known = [memory for number, memory in nodes.items() if number in allowed]
    total = sum(memory.get("MemTotal", 0) for memory in known)
    return (
        (total, sum(memory.get("MemFree", 0) + memory.get("Inactive(file)", 0) for memory in known)) if total else None
    )


def _node_memory(file: Path) -> dict[str, int]:
    """Bytes by name: `Node 0 MemTotal:       10053848 kB`."""
    lines = [line.split() for line in _lines(file)]
    return {words[2].rstrip(":"): int(words[3]) * 1024 for words in lines if len(words) >= 4 and words[3].isdigit()}


def _quota_v2(level: Path) -> float | None:
    parts = text_of(level / "cpu.max").split()
    if len(parts) != 2 or not parts[0].isdigit() or not parts[1].isdigit() or int(parts[1]) == 0:
        return None  # "max 100000", or the root, which has no such file
    return int(parts[0]) / int(parts[1])


def _quota_v1(level: Path) -> float | None:
    quota, period = _number(level / "cpu.cfs_quota_us"), _number(level / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None  # -1: no quota


def _memory_level(
    level: Path, limit_files: tuple[str, ...], usage_file: str, cache_key: str, limits: list[int], free: list[int]
) -> None:
    """Adds what one level sets. `memory.high` counts: above it the kernel stalls the process instead of killing it."""
    here = [limit for name in limit_files if (limit := _bounded(_number(level / name))) is not None]
    if not here:
        return
    limits.append(min(here))
    usage = _number(level / usage_file)
    if usage is not None:
        cache = _stat_value(level / "memory.stat", cache_key) or 0
        free.append(max(0, min(here) - max(0, usage - cache)))


def _bounded(value: int | None) -> int | None:
    return value if value is not None and 0 < value < _NO_LIMIT_FROM_BYTES else None


def _stat_value(file: Path, key: str) -> int | None:
    for line in _lines(file):
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return None


def _number(file: Path) -> int | None:
    text = text_of(file).strip()
    return int(text) if text.lstrip("-").isdigit() else None  # "max": no limit


def _lines(file: Path) -> list[str]:
    return text_of(file).splitlines()


def _keep(values: list[Number], value: Number | None) -> None:
    if value is not None:
        values.append(value)
