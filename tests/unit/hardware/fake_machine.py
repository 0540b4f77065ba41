"""Machines that are not here: as values, and as /proc and /sys laid out in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coremill.hardware.facts import Core, NodeFacts

X86_FLAGS = "fpu sse2 avx avx2 avx512f avx512_bf16 amx_tile amx_bf16"
ARM_FEATURES = "fp asimd atomics asimddp sve bf16 i8mm"


def node_of(cores: int = 4, *, numa_nodes: int = 1, siblings: bool = False, **changes: Any) -> NodeFacts:
    """Facts of a quiet machine with AMX; `changes` replaces any of them."""
    per_node = cores // numa_nodes
    values: dict[str, Any] = {
        "hostname": "box",
        "architecture": "x86_64",
        "cpu_model": "Some CPU",
        "cores": tuple(
            Core(cpus=(index, index + cores) if siblings else (index,), numa_node=index // per_node, socket=0)
            for index in range(cores)
        ),
        "cpu_quota": None,
        "isa": ("amx_bf16",),
        "memory_total_bytes": 64 * 2**30,
        "memory_available_bytes": 60 * 2**30,
        "memory_limit_bytes": None,
        "interfaces": (),
        "allocators": (),
        "openmp": None,
        "huge_pages": "madvise",
        "busy_fraction": 0.0,
        **changes,
    }
    return NodeFacts(**values)


class FakeMachine:
    """A root folder that probe's readers take for `/`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def x86(self, cpus: int, *, model: str = "Intel(R) Xeon(R) Platinum 8488C", flags: str = X86_FLAGS) -> None:
        blocks = [
            f"processor\t: {cpu}\nvendor_id\t: GenuineIntel\nmodel name\t: {model}\nflags\t\t: {flags}\n"
            for cpu in range(cpus)
        ]
        self.write("proc/cpuinfo", "\n".join(blocks))
        self.write("sys/devices/system/cpu/online", f"0-{cpus - 1}\n")

    def arm(self, cpus: int, *, part: str = "0xd40", features: str = ARM_FEATURES) -> None:
        blocks = [
            f"processor\t: {cpu}\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"
            for cpu in range(cpus)
        ]
        self.write("proc/cpuinfo", "\n".join(blocks))

    def core(self, cpus: list[int], *, socket: int, core: int = 0, name: str = "core_cpus_list") -> None:
        for cpu in cpus:
            folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
            self.write(f"{folder}/{name}", ",".join(map(str, cpus)) + "\n")
            self.write(f"{folder}/physical_package_id", f"{socket}\n")
            self.write(f"{folder}/core_id", f"{core}\n")

    def numa(self, node: int, cpulist: str) -> None:
        self.write(f"sys/devices/system/node/node{node}/cpulist", cpulist + "\n")

    def memory(self, total_kib: int, available_kib: int) -> None:
        self.write("proc/meminfo", f"MemTotal: {total_kib} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n")

    def two_sockets(self, numbering: str) -> None:
        """2 sockets x 4 cores x 2 threads; siblings numbered (0, 1) or (0, 8)."""
        self.x86(16)
        for core in range(8):
            siblings = [2 * core, 2 * core + 1] if numbering == "adjacent" else [core, core + 8]
            self.core(siblings, socket=core // 4, core=core % 4)
        if numbering == "adjacent":
            self.numa(0, "0-7")
            self.numa(1, "8-15")
        else:
            self.numa(0, "0-3,8-11")
            self.numa(1, "4-7,12-15")
