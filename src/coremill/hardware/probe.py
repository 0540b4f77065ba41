"""Looks at this machine and says what this process may use of it.

Linux first: affinity mask, /sys topology, cgroup limits. Where files are missing (another system, a sandbox) psutil
fills in, and the result is poorer but never wrong. Nothing here is slow except one look at how busy the cores are (a
fifth of a second). Every reader takes the folder that holds /proc and /sys, so other machines can be laid out as files.

The environment of the process is read here and in world/group.py only; others are handed `environment_snapshot()`.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from coremill.errors import InputError
from coremill.files import at_home
from coremill.hardware.cgroup import read_cgroup_limits
from coremill.hardware.facts import Core, Interface, NodeFacts
from coremill.hardware.topology import (
    cores_without_sysfs,
    cpuinfo_blocks,
    read_architecture,
    read_cores,
    read_cpu_model,
    read_isa,
    text_of,
)

_SYSTEM = Path("/")
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
_ALLOCATOR_PATTERNS = {
    # The full library before the one without profiling; debug and profiler builds are not for speed.
    "tcmalloc": ("libtcmalloc.so*", "libtcmalloc_minimal.so*"),
    "jemalloc": ("libjemalloc.so*",),
}
_OPENMP_PATTERNS = ("libiomp5.so*",)


def environment_snapshot() -> dict[str, str]:
    """The environment as it is now, for those that may not read it themselves."""
    return dict(os.environ)


def replace_environment(environ: Mapping[str, str]) -> None:
    """Make it exactly this, as for a process that was started with it."""
    for name in [name for name in os.environ if name not in environ]:
        del os.environ[name]
    os.environ.update(environ)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where coremill keeps what it can make again: COREMILL_CACHE, else the user's cache folder."""
    if environ.get("COREMILL_CACHE"):
        return at_home(environ["COREMILL_CACHE"])
    if environ.get("XDG_CACHE_HOME"):
        return at_home(environ["XDG_CACHE_HOME"]) / "coremill"
    try:
        return Path(environ.get("HOME") or Path.home()) / ".cache" / "coremill"
    except RuntimeError:
        raise InputError(
            "there is no folder to keep things in",
            where="HOME",
            why=f"it is not set, and this system knows no user {os.getuid()}",
            do="set COREMILL_CACHE to a folder that you may write",
        ) from None


def probe_node(root: Path = _SYSTEM, *, mask: Iterable[int] | None = None, busy_seconds: float = 0.2) -> NodeFacts:
    """Everything about this machine that a plan needs.

    `mask` replaces the affinity mask of this process; `busy_seconds` is how long others are watched (0: not at all).
    """
    usable = frozenset(mask) if mask is not None else affinity_mask()
    cores = read_cores(usable, root) if cpuinfo_blocks(root) or root != _SYSTEM else cores_without_sysfs()
    limits = read_cgroup_limits(root)
    architecture = read_architecture(root)
    total_bytes, available_bytes = read_memory(root)
    if limits.memory_free_bytes is not None:
        available_bytes = min(available_bytes, limits.memory_free_bytes)
    busy_cores = measure_busy_cores(cores, root, seconds=busy_seconds) if busy_seconds > 0 else 0.0
    folders = library_folders(architecture, root)
    openmp = find_library(_OPENMP_PATTERNS, folders, architecture)
    return NodeFacts(
        hostname=socket.gethostname(),
        architecture=architecture,
        cpu_model=read_cpu_model(root),
        cores=cores,
        cpu_quota=limits.cpu_quota,
        isa=read_isa(usable, root),
        memory_total_bytes=total_bytes,
        memory_available_bytes=available_bytes,
        memory_limit_bytes=limits.memory_limit_bytes,
        interfaces=read_interfaces(),
        allocators=tuple(
            (name, str(path))
            for name, patterns in _ALLOCATOR_PATTERNS.items()
            if (path := find_library(patterns, folders, architecture)) is not None
        ),
        openmp=str(openmp) if openmp is not None else None,
        huge_pages=read_huge_pages(root),
        busy_fraction=busy_fraction(busy_cores, len(cores), limits.cpu_quota),
    )


def affinity_mask() -> frozenset[int]:
    """The cpus this process may run on; a pod's cpuset is already in it."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(psutil.cpu_count() or 1))


def boot_id() -> str:
    """What names the running kernel: different on every machine and after every start; empty where unknown."""
    return text_of(Path("/proc/sys/kernel/random/boot_id")).strip()


# -- memory and pages


def read_memory(root: Path = _SYSTEM) -> tuple[int, int]:
    """Bytes of RAM, and how many a new process could have without swapping."""
    values = {}
    for line in text_of(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    if "MemTotal" in values:
        # Kernels before 3.14 do not estimate what is available.
        return values["MemTotal"], values.get("MemAvailable", values.get("MemFree", 0) + values.get("Cached", 0))
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def read_huge_pages(root: Path = _SYSTEM) -> str | None:
    """The mode of transparent huge pages: the word in brackets."""
    match = re.search(r"\[(\w+)\]", text_of(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return match.group(1) if match else None


def read_governor(root: Path = _SYSTEM) -> str | None:
    """How the kernel picks the clock; None in most virtual machines, where the host decides."""
    return text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None


def read_clock_driver(root: Path = _SYSTEM) -> str | None:
    """The driver behind the governor: some follow the load whatever the governor is called."""
    return text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver").strip() or None


# -- how busy others keep the cores


class BusyWatch:
    """Watches from its creation on how many cores other processes keep busy, time stolen by the hypervisor included.

    A core with one busy hardware thread is a busy core. What this process itself used meanwhile is taken off.
    """

    def __init__(
        self,
        cores: Sequence[Core],
        root: Path = _SYSTEM,
        *,
        clock: Callable[[], float] = time.perf_counter,
        own_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._cores, self._root, self._clock, self._own_seconds = cores, root, clock, own_seconds
        self._ticks, self._own_before, self._started = _busy_and_total_ticks(root), own_seconds(), clock()

    def busy_cores(self) -> float:
        """The cores that others held since then, on average."""
        elapsed, own = self._clock() - self._started, self._own_seconds() - self._own_before
        now = _busy_and_total_ticks(self._root)
        busy = 0.0
        for core in self._cores:
            shares = [0.0]
            for cpu in core.cpus:
                (busy_before, total_before), (busy_now, total_now) = self._ticks.get(cpu, (0, 0)), now.get(cpu, (0, 0))
                if total_now > total_before > 0:
                    shares.append((busy_now - busy_before) / (total_now - total_before))
            busy += max(shares)
        return min(float(len(self._cores)), max(0.0, busy - own / elapsed)) if elapsed > 0 else 0.0


def measure_busy_cores(cores: Sequence[Core], root: Path = _SYSTEM, *, seconds: float = 0.2) -> float:
    """How many of the cores other processes keep busy, watched for a moment."""
    watch = BusyWatch(cores, root)
    time.sleep(seconds)
    return watch.busy_cores()


def busy_fraction(busy_cores: float, cores: int, cpu_quota: float | None) -> float:
    """The share of what we may use that others hold: with a quota of 4 on a half busy machine of 64, nothing."""
    usable = cores if cpu_quota is None else max(1.0, min(float(cores), cpu_quota))
    return min(1.0, max(0.0, usable - (cores - busy_cores)) / usable) if usable else 0.0


def _busy_and_total_ticks(root: Path) -> dict[int, tuple[int, int]]:
    """Per cpu: clock ticks at work (time stolen by the hypervisor included), and all ticks."""
    ticks = {}
    for line in text_of(root / "proc/stat").splitlines():
        match = re.match(r"cpu(\d+)\s+(.*)", line)
        if match:
            # user nice system idle iowait irq softirq steal; guest time is already part of user
            values = [int(word) for word in match.group(2).split()[:8]]
            ticks[int(match.group(1))] = (sum(values) - sum(values[3:5]), sum(values))
    return ticks


# -- network


def read_interfaces(
    addresses: Mapping[str, Sequence[Any]] | None = None, stats: Mapping[str, Any] | None = None
) -> tuple[Interface, ...]:
    """The interfaces that are up and have an address, IPv4 preferred; loopback last."""
    try:
        addresses = psutil.net_if_addrs() if addresses is None else addresses
        stats = psutil.net_if_stats() if stats is None else stats
    except (OSError, psutil.Error):  # a sandbox that hides them
        return ()
    interfaces = []
    for name, entries in addresses.items():
        state = stats.get(name)
        address = _address_of(entries)
        if state is None or not state.isup or address is None:
            continue
        # Drivers that do not know say 0, -1 or 65535 Mbit/s (-1 in 16 bits).
        known = 0 < state.speed != 65535
        is_loopback = address.startswith("127.") or address == "::1"
        speed = state.speed * 1_000_000 if known and not is_loopback else None
        interfaces.append(Interface(name=name, address=address, is_loopback=is_loopback, bits_per_second=speed))
    return tuple(sorted(interfaces, key=lambda interface: (interface.is_loopback, interface.name)))


def _address_of(entries: Sequence[Any]) -> str | None:
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family and entry.address:
                return str(entry.address).partition("%")[0]  # fe80::1%eth0
    return None


# -- libraries worth preloading


def library_folders(architecture: str, root: Path = _SYSTEM) -> list[Path]:
    """Where allocators and OpenMP runtimes are found: this Python's own folders, then the system's."""
    own = []
    if root == _SYSTEM:
        own = [Path(sys.prefix) / "lib"]
        for packages in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
            own += [packages / "torch/lib", *sorted(packages.glob("*/lib")), *sorted(packages.glob("*/lib64"))]
    system = (
        f"usr/lib/{architecture}-linux-gnu",  # Debian, Ubuntu
        f"lib/{architecture}-linux-gnu",
        "usr/lib64",  # Red Hat, SUSE, Amazon Linux
        "usr/local/lib",
        "usr/local/lib64",
        "usr/lib",
        "opt/intel/oneapi/compiler/latest/lib",
        "opt/intel/oneapi/compiler/latest/linux/compiler/lib/intel64_lin",
    )
    return list(dict.fromkeys([*own, *(root / folder for folder in system)]))


def find_library(patterns: Sequence[str], folders: Sequence[Path], architecture: str) -> Path | None:
    """The first library that fits a pattern and this processor (a foreign one would fail every preload)."""
    found = (path for pattern in patterns for folder in folders for path in sorted(folder.glob(pattern)))
    return next((path for path in found if _is_library_for(path, architecture)), None)


def _is_library_for(path: Path, architecture: str) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(20)
    except OSError:
        return False
    is_64_bit_elf = head[:5] == b"\x7fELF\x02"
    machine = int.from_bytes(head[18:20], "little")
    return is_64_bit_elf and machine == _ELF_MACHINES.get(architecture, machine)
