"""Which cores this process may use, how they hang together, and what instructions they have.

Linux tells it in /sys and /proc/cpuinfo. Cpu numbers say nothing by themselves: siblings of one core may be 0 and 1
or 0 and 64, and a pod's cpuset may hold one sibling of a core and not the other. So cores are grouped by what the
kernel lists.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

import psutil

from coremill.hardware.facts import Core

_ISA_FLAGS = {
    # flag in /proc/cpuinfo -> our name, best first
    "amx_bf16": "amx_bf16",
    "avx512_bf16": "avx512_bf16",
    "avx512f": "avx512f",
    "avx2": "avx2",
    "bf16": "arm_bf16",
    "sve": "sve",
}

# ARM kernels give numbers, not names: (implementer, part). From the kernel's cputype.h.
_ARM_NAMES = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd83"): "Neoverse-V3AE",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd8e"): "Neoverse-N3",
    ("0xc0", "0xac3"): "AmpereOne",
    ("0xc0", "0xac4"): "AmpereOne-1A",
    ("0x48", "0xd01"): "Kunpeng-920",
}


def text_of(file: Path) -> str:
    """A file of the kernel's; empty where there is none or it may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's list form: "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if first.isdigit() and (not dash or last.isdigit()):
            cpus.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(cpus))


def online_cpus(root: Path = Path("/")) -> tuple[int, ...]:
    """All cpus of the machine, usable or not; empty where the kernel does not say."""
    return parse_cpu_list(text_of(root / "sys/devices/system/cpu/online"))


def read_cores(mask: Iterable[int], root: Path = Path("/")) -> tuple[Core, ...]:
    """The physical cores behind the cpus of the mask, by NUMA node, socket and first cpu."""
    numa_of_cpu = _numa_of_cpu(root)
    blocks = cpuinfo_blocks(root)
    groups: dict[object, list[int]] = {}
    socket_of: dict[object, int] = {}
    for cpu in sorted(frozenset(mask)):
        key, socket = _core_of(cpu, root, blocks)
        groups.setdefault(key, []).append(cpu)
        socket_of.setdefault(key, socket)
    cores = [
        Core(cpus=tuple(cpus), numa_node=numa_of_cpu.get(cpus[0], 0), socket=socket_of[key])
        for key, cpus in groups.items()
    ]
    return tuple(sorted(cores, key=lambda core: (core.numa_node, core.socket, core.cpus)))


def cores_without_sysfs(count: int | None = None) -> tuple[Core, ...]:
    """A machine without Linux: as many cores as it has, on one node, unbound in practice."""
    physical = count or psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return tuple(Core(cpus=(index,), numa_node=0, socket=0) for index in range(physical))


def _core_of(cpu: int, root: Path, blocks: dict[int, dict[str, str]]) -> tuple[object, int]:
    """What names the core of a cpu, and its socket."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    package = text_of(topology / "physical_package_id").strip()
    block = blocks.get(cpu, {})
    if not package.isdigit():  # ARM virtual machines say -1; sandboxes have no topology folder
        package = block.get("physical id", "0")
    socket = int(package) if package.isdigit() else 0
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the older name of the first
        siblings = parse_cpu_list(text_of(topology / name))
        if cpu in siblings:
            return siblings, socket
    if "core id" in block:
        return (socket, block["core id"]), socket
    return cpu, socket


def _numa_of_cpu(root: Path) -> dict[int, int]:
    nodes: dict[int, int] = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        for cpu in parse_cpu_list(text_of(folder / "cpulist")):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    return nodes


def cpuinfo_blocks(root: Path = Path("/")) -> dict[int, dict[str, str]]:
    """/proc/cpuinfo by cpu number."""
    blocks: dict[int, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, colon, value = line.partition(":")
        if not colon:
            continue
        if name.strip() == "processor" and value.strip().isdigit():
            current = blocks.setdefault(int(value), {})
        current[name.strip()] = value.strip()
    return blocks


def read_isa(mask: Iterable[int], root: Path = Path("/")) -> tuple[str, ...]:
    """The instruction sets that count here and that every usable cpu has."""
    blocks = cpuinfo_blocks(root)
    seen = [
        set((blocks[cpu].get("flags") or blocks[cpu].get("Features") or "").split()) for cpu in mask if cpu in blocks
    ]
    common = set.intersection(*seen) if seen else set()
    return tuple(name for flag, name in _ISA_FLAGS.items() if flag in common)


def read_architecture(root: Path = Path("/")) -> str:
    """x86_64 or aarch64, by what /proc/cpuinfo looks like, else what Python says."""
    block = next(iter(cpuinfo_blocks(root).values()), {})
    if "vendor_id" in block or "flags" in block:
        return "x86_64"
    if "CPU implementer" in block or "Features" in block:
        return "aarch64"
    machine = platform.machine()
    return {"arm64": "aarch64", "AMD64": "x86_64", "amd64": "x86_64"}.get(machine, machine or "unknown")


def read_cpu_model(root: Path = Path("/")) -> str:
    """The name of the CPU as people know it."""
    block = next(iter(cpuinfo_blocks(root).values()), {})
    if block.get("model name"):
        return " ".join(block["model name"].split())
    implementer, part = block.get("CPU implementer"), block.get("CPU part")
    if implementer and part:
        return _ARM_NAMES.get((implementer.lower(), part.lower()), f"ARM implementer {implementer} part {part}")
    return platform.processor() or platform.machine() or "unknown CPU"
