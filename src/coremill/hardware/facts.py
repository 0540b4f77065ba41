"""What is known about the machines: plain values, made by probe, calibrate and instances, read by the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Core:
    """A physical core this process may use, with those of its hardware threads it may use (the first one computes)."""

    cpus: tuple[int, ...]
    numa_node: int
    socket: int


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up."""

    name: str
    address: str
    is_loopback: bool
    bits_per_second: int | None  # None where the driver does not say


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One machine, as far as this process may use it (affinity mask and cgroup limits already applied)."""

    hostname: str
    architecture: str  # x86_64, aarch64
    cpu_model: str
    cores: tuple[Core, ...]
    cpu_quota: float | None  # cgroup CPUs per second of wall time; None: no quota
    isa: tuple[str, ...]  # of: amx_bf16, avx512_bf16, avx512f, avx2, arm_bf16, sve
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None  # the smallest cgroup limit on the path; None: no limit
    interfaces: tuple[Interface, ...]
    allocators: tuple[tuple[str, str], ...]  # (tcmalloc | jemalloc, path of the library)
    openmp: str | None  # path of libiomp5 where present
    huge_pages: str | None  # transparent huge pages: always, madvise, never
    busy_fraction: float  # share of the usable cores that others keep busy now

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """The NUMA nodes that hold usable cores."""
        return tuple(sorted({core.numa_node for core in self.cores}))

    @property
    def usable_cores(self) -> int:
        """Physical cores, or fewer where a cgroup quota allows fewer."""
        return len(self.cores) if self.cpu_quota is None else max(1, min(len(self.cores), int(self.cpu_quota)))

    @property
    def memory_bytes(self) -> int:
        """The smaller of RAM and the cgroup limit."""
        return min(self.memory_total_bytes, self.memory_limit_bytes or self.memory_total_bytes)

    @property
    def has_bf16_units(self) -> bool:
        """Whether bf16 products run in hardware; without, they are some 300 times slower than fp32."""
        return bool({"amx_bf16", "avx512_bf16", "arm_bf16"} & set(self.isa))


@dataclass(frozen=True, kw_only=True)
class Observation:
    """How a finished run on this machine went beside its plan; factors are measured over planned."""

    run: str  # its folder
    engine: str
    dtype: str
    compute: float
    optimizer: float
    communication: float | None  # what arithmetic did not hide; None: nothing was exchanged
    slack: float  # memory beyond what was alive
    matmul_flops_per_second: float  # the calibrated rates that the plan was made with
    copy_bytes_per_second: float
    moved_by: str = "adamw"  # train.optimizer


# Widths of models that splits are measured at.
SPLIT_WIDTHS = (256, 768, 1536)


@dataclass(frozen=True, kw_only=True)
class SplitRates:
    """A machine whose cores are split evenly among so many processes that compute at once: the seconds of a part of a
    step over those of one process for each NUMA node, for the same work; by SPLIT_WIDTHS where width matters."""

    processes: int
    products: tuple[float, ...]
    between: tuple[float, ...]  # norms, gates, rotary positions, residuals
    attention: tuple[float, ...]
    update: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rates of one machine with all its usable cores: measured in a child process, or declared for one out of reach."""

    source: Literal["measured", "assumed"]
    origin: str  # where the numbers come from, in words
    threads: int
    fp32_matmul_flops_per_second: float
    bf16_matmul_flops_per_second: float | None  # None: not measured, the CPU has no units for it
    copy_bytes_per_second: float  # bytes read plus bytes written
    base_rss_bytes: int  # an interpreter with torch, transformers and coremill imported, one step done
    torch_version: str
    taken_while_busy: bool = False
    bf16_emulated_flops_per_second: float | None = None  # only where there are no bf16 units: what bf16 would cost
    learned: tuple[Observation, ...] = ()  # from runs the user had it learn from
    splits: tuple[SplitRates, ...] = ()  # fewest processes first; none: not known, as where there is one core


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The machines a run is planned for; all alike."""

    nodes: int
    node: NodeFacts
    calibration: Calibration
    name: str  # "this machine", "4 x c7i.8xlarge"
    link_bits_per_second: float | None  # per node; None: not known, or not needed
    link_flow_bits_per_second: float | None = None  # cap of one TCP flow, where the cloud has one
    usd_per_hour: float | None = None  # of the whole fleet
    memory_bytes_per_node: int | None = None  # what a pod may have (allocatable); None: all of the node's memory
    pod: str | None = None  # in words: what a pod has, where the run is in pods; and why so much
    pod_reason: str = ""
    price_words: str | None = None  # which price it is

    @property
    def limit_bytes_per_node(self) -> int:
        """What all ranks of a node may hold together."""
        return min(self.node.memory_bytes, self.memory_bytes_per_node or self.node.memory_bytes)
