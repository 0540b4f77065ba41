"""The AWS table, and fleets made from it: types we cannot touch, with declared rates that are marked as assumed.

The table (instances.json, made by scripts/refresh_instances.py) holds the Intel 7i and 8i types: vCPUs, cores, memory,
network, EFA, what Kubernetes leaves allocatable, and the on-demand price. `live_instances` asks EC2 itself where boto3
has credentials.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.hardware.cores import rank_counts
from coremill.hardware.facts import SPLIT_WIDTHS, Calibration, Core, Fleet, NodeFacts, SplitRates
from coremill.hardware.hostfile import read_hostfile

# Per physical core, training shapes, all cores of a 16-core Emerald Rapids Xeon busy: 3.8 to 4.8 TFLOP/s in bf16 (AMX)
# and 1.3 to 1.6 in fp32 (AVX-512). Sapphire and Granite Rapids are given the same.
BF16_FLOPS_PER_SECOND_PER_CORE = 0.27e12
FP32_FLOPS_PER_SECOND_PER_CORE = 0.09e12
# Sixteen cores share about 100 GB/s; a socket with eight DDR5 channels ends near 250.
COPY_BYTES_PER_SECOND_PER_CORE = 6.0e9
COPY_BYTES_PER_SECOND_PER_SOCKET = 250e9
# An interpreter with torch, transformers and coremill after one step.
BASE_RSS_BYTES = 450_000_000
# Where threads wait for each other, between small operations: so much longer for each thread of a rank beyond the
# first, up to 16 of them. Declared, not measured, careful: by it four ranks of a 1.24 B model on 16 cores are planned
# as quick as one (0.99), where 1.03 to 1.09 was seen.
WAIT_PER_THREAD = 0.02
MOST_WAITING_THREADS = 16
# AWS caps one TCP flow between instances outside a cluster placement group.
FLOW_BITS_PER_SECOND = 5e9

# Physical cores per socket, by what the family name begins with; the first match counts. From the vendors' pages.
_CORES_PER_SOCKET = (("r7iz", 32), ("u7i", 56), (r"[a-z]+7i", 48), (r"[a-z]+8i", 96))
_FLEET = re.compile(r"\s*(?:(\d+)\s*[x*]\s*)?([a-z0-9-]+\.[a-z0-9-]+)\s*$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One EC2 instance type."""

    name: str
    vcpus: int
    cores: int  # physical
    memory_mib: int
    network_baseline_gbps: float  # what it can hold; of one network card
    network_peak_gbps: float
    efa_interfaces: int  # of the Elastic Fabric Adapter; 0: it has none
    ena_express: bool
    bare_metal: bool
    local_nvme_gb: int
    allocatable_cpu_milli: int | None  # what Kubernetes leaves to pods; None: not known
    allocatable_memory_mib: int | None
    usd_per_hour: float | None  # Linux, on demand, region of the table; None: no price known

    @property
    def efa(self) -> bool:
        return self.efa_interfaces > 0

    @property
    def family(self) -> str:
        """c7i of c7i.8xlarge."""
        return self.name.split(".")[0]

    @property
    def series(self) -> str:
        """The letters before the generation: c, m, r, i, x, u, t."""
        return re.split(r"\d", self.family)[0]

    @property
    def is_flex(self) -> bool:
        """Flex types promise full speed for 95 % of the time only."""
        return "-flex" in self.family

    @property
    def sockets(self) -> int:
        """NUMA nodes, one per socket."""
        per_socket = (cores for pattern, cores in _CORES_PER_SOCKET if re.match(pattern, self.family))
        return ceil(self.cores / next(per_socket, self.cores))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "family": self.family, "efa": self.efa}


@dataclass(frozen=True, kw_only=True)
class Table:
    """The shipped table with where and when it comes from."""

    sources: dict[str, str]
    region: str
    price_date: str
    instances: tuple[Instance, ...]


@cache
def table() -> Table:
    document = json.loads(resources.files("coremill.hardware").joinpath("instances.json").read_text(encoding="utf-8"))
    columns = document["columns"]
    return Table(
        sources=document["sources"],
        region=document["region"],
        price_date=document["price_date"],
        instances=tuple(Instance(**dict(zip(columns, row, strict=True))) for row in document["instances"]),
    )


def all_instances() -> tuple[Instance, ...]:
    """Every type of the shipped table, by name."""
    return table().instances


def find_instances(family: str | None = None, efa: bool | None = None) -> tuple[Instance, ...]:
    """Types of a family (c7i: that family alone; 7i: all whose name has it) and with or without EFA."""
    found = all_instances()
    if family is not None:
        exact = tuple(one for one in found if one.family == family)
        found = exact or tuple(one for one in found if family in one.family)
        if not found:
            raise InputError(
                f"no instance family {family!r} in the table",
                where="--family",
                do="one of " + ", ".join(sorted({one.family for one in all_instances()})),
            )
    if efa is not None:
        found = tuple(one for one in found if one.efa == efa)
    return tuple(sorted(found, key=lambda one: (one.family, one.vcpus, one.name)))


def instance_named(name: str, *, where: str = "fleet.instance") -> Instance:
    """One type; unknown names are answered with the nearest ones."""
    by_name = {one.name: one for one in all_instances()}
    found = by_name.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), by_name, n=3, cutoff=0.5)
    raise InputError(
        f"no instance type {name!r} in the table",
        where=where,
        do=("did you mean " + ", ".join(near) + "?") if near else "`coremill instances` lists the types",
    )


def nodes_and_instance(text: str) -> tuple[int, Instance]:
    """4 and the type, of `4xc7i.8xlarge`."""
    match = _FLEET.match(text)
    nodes = int(match.group(1) or 1) if match else 0
    if match is None or nodes < 1:
        what = f"{text!r} is not a fleet" if match is None else "a fleet has at least one machine"
        raise InputError(what, where="--fleet", do="write the number and the type, like 4xc7i.8xlarge")
    return nodes, instance_named(match.group(2))


def fleet_of(text: str) -> Fleet:
    """The fleet `4xc7i.8xlarge` stands for, with declared rates."""
    nodes, instance = nodes_and_instance(text)
    allocatable = instance.allocatable_memory_mib
    return Fleet(
        nodes=nodes,
        node=node_facts_of(instance),
        calibration=assumed_calibration(instance),
        name=f"{nodes} x {instance.name}",
        link_bits_per_second=instance.network_baseline_gbps * 1e9,  # of one machine too: a plan may try more of them
        link_flow_bits_per_second=FLOW_BITS_PER_SECOND,
        usd_per_hour=None if instance.usd_per_hour is None else nodes * instance.usd_per_hour,
        memory_bytes_per_node=None if allocatable is None else allocatable * 2**20,
    )


def node_facts_of(instance: Instance) -> NodeFacts:
    """The machine as its type declares it: hardware threads of core i are CPUs i and i + cores."""
    threads = max(1, instance.vcpus // instance.cores)
    per_socket = ceil(instance.cores / instance.sockets)
    return NodeFacts(
        hostname=instance.name,
        architecture="x86_64",
        cpu_model=f"Intel Xeon of {instance.family}",
        cores=tuple(
            Core(
                cpus=tuple(core + instance.cores * thread for thread in range(threads)),
                numa_node=core // per_socket,
                socket=core // per_socket,
            )
            for core in range(instance.cores)
        ),
        cpu_quota=None,
        isa=("amx_bf16", "avx512_bf16", "avx512f", "avx2"),
        memory_total_bytes=instance.memory_mib * 2**20,
        memory_available_bytes=instance.memory_mib * 2**20,
        memory_limit_bytes=None,
        interfaces=(),
        allocators=(),
        openmp=None,
        huge_pages=None,
        busy_fraction=0.0,
    )


def assumed_calibration(instance: Instance) -> Calibration:
    """Declared rates times cores; never marked as measured."""
    cores = instance.cores
    return Calibration(
        source="assumed",
        origin=f"{cores} cores at {BF16_FLOPS_PER_SECOND_PER_CORE / 1e12:.2f} TFLOP/s in bf16 and"
        f" {FP32_FLOPS_PER_SECOND_PER_CORE / 1e12:.2f} in fp32, as measured on a 16-core Emerald Rapids Xeon",
        threads=cores,
        fp32_matmul_flops_per_second=cores * FP32_FLOPS_PER_SECOND_PER_CORE,
        bf16_matmul_flops_per_second=cores * BF16_FLOPS_PER_SECOND_PER_CORE,
        copy_bytes_per_second=min(
            cores * COPY_BYTES_PER_SECOND_PER_CORE, instance.sockets * COPY_BYTES_PER_SECOND_PER_SOCKET
        ),
        base_rss_bytes=BASE_RSS_BYTES,
        torch_version="",
        splits=assumed_splits(node_facts_of(instance)),
    )


def assumed_splits(node: NodeFacts) -> tuple[SplitRates, ...]:
    """What threads wait for each other, declared; products, attention and update are taken to be indifferent to it."""
    counts = rank_counts(node)

    def waiting(ranks: int) -> float:
        threads = min(MOST_WAITING_THREADS, node.usable_cores // ranks)
        return 1 + WAIT_PER_THREAD * (threads - 1)

    alike = (1.0,) * len(SPLIT_WIDTHS)
    return tuple(
        SplitRates(
            processes=ranks,
            products=alike,
            between=(waiting(ranks) / waiting(counts[0]),) * len(SPLIT_WIDTHS),
            attention=alike,
            update=1.0,
        )
        for ranks in counts
    )


def this_machine(
    node: NodeFacts, calibration: Calibration, *, nodes: int = 1, link_bits_per_second: float | None = None
) -> Fleet:
    """This machine, or several like it on a link as measured, else on the fastest interface that says its speed."""
    speeds = [face.bits_per_second for face in node.interfaces if not face.is_loopback and face.bits_per_second]
    return Fleet(
        nodes=nodes,
        node=node,
        calibration=calibration,
        name="this machine" if nodes == 1 else f"{nodes} x this machine",
        link_bits_per_second=link_bits_per_second or (float(max(speeds)) if nodes > 1 and speeds else None),
    )


def fleet_of_hostfile(path: str | Path, node: NodeFacts, calibration: Calibration) -> Fleet:
    """The hosts of an MPI hostfile (`host`, `host slots=2`, `host:2`), each taken to be like this machine."""
    hosts = read_hostfile(path)
    fleet = this_machine(node, calibration, nodes=len(hosts))
    return fleet if len(hosts) == 1 else replace(fleet, name=f"{len(hosts)} x hosts of {Path(path).name}")


def live_instances(
    *, region: str | None = None, pattern: str | None = None, efa: bool | None = None, client: Any = None
) -> tuple[Instance, ...]:
    """What EC2 offers now (describe-instance-types, all pages), with price and allocatable of the shipped table."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(
            "asking EC2 needs boto3", do="install it with `pip install 'coremill[aws]'`, or leave --live out"
        ) from error
    filters = []
    if pattern is not None:
        filters.append({"Name": "instance-type", "Values": [pattern]})
    if efa is not None:
        filters.append({"Name": "network-info.efa-supported", "Values": [str(efa).lower()]})
    try:
        ec2 = client or boto3.client("ec2", region_name=region)
        pages = ec2.get_paginator("describe_instance_types").paginate(Filters=filters)
        rows = [row for page in pages for row in page["InstanceTypes"]]
    except (BotoCoreError, ClientError) as error:
        raise InputError(
            "EC2 did not answer", why=str(error), do="check credentials and region, or leave --live out"
        ) from error
    shipped = {one.name: one for one in all_instances()}
    same_region = region in (None, table().region)
    found = [instance_of_description(row, shipped.get(row["InstanceType"]), with_price=same_region) for row in rows]
    return tuple(sorted(found, key=lambda one: (one.family, one.vcpus, one.name)))


def instance_of_description(row: dict[str, Any], known: Instance | None, *, with_price: bool = True) -> Instance:
    """One entry of describe-instance-types as an Instance."""
    network, cpu = row.get("NetworkInfo", {}), row["VCpuInfo"]
    cards = network.get("NetworkCards") or [{}]
    efa = network.get("EfaInfo", {})
    written = re.search(r"([\d.]+)\s*Gigabit", network.get("NetworkPerformance", ""))  # Up to 12.5 Gigabit
    peak = float(cards[0].get("PeakBandwidthInGbps") or (written.group(1) if written else 0.0))
    vcpus = int(cpu["DefaultVCpus"])
    threads = int(cpu.get("DefaultThreadsPerCore") or 1)
    return Instance(
        name=row["InstanceType"],
        vcpus=vcpus,
        cores=int(cpu.get("DefaultCores") or vcpus // threads),
        memory_mib=int(row["MemoryInfo"]["SizeInMiB"]),
        network_baseline_gbps=float(cards[0].get("BaselineBandwidthInGbps") or peak),
        network_peak_gbps=peak,
        efa_interfaces=int(efa.get("MaximumEfaInterfaces", 1)) if network.get("EfaSupported") else 0,
        ena_express=bool(network.get("EnaSrdSupported", False)),
        bare_metal=bool(row.get("BareMetal", False)),
        local_nvme_gb=int(row.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0)),
        allocatable_cpu_milli=known.allocatable_cpu_milli if known else None,
        allocatable_memory_mib=known.allocatable_memory_mib if known else None,
        usd_per_hour=known.usd_per_hour if known and with_price else None,
    )
