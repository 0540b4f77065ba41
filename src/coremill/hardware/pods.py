"""What a pod gets of its instance: the one answer for the plan and for the manifest.

A pod is not its instance. The kubelet and the system keep CPU and memory for themselves, agents on every node
(DaemonSets) take some, and a pod with cores of its own gets whole ones: of the 32 CPUs of a c7i.8xlarge 30, which are
15 cores, and of its 64 GiB 55.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coremill.config.kubernetes_section import KubernetesSection
from coremill.config.schema import AUTO, RunConfig
from coremill.errors import InputError
from coremill.hardware.facts import Fleet
from coremill.hardware.instances import (
    FLOW_BITS_PER_SECOND,
    Instance,
    all_instances,
    assumed_calibration,
    instance_named,
    node_facts_of,
    table,
)

# What the usual agents of a node ask for together: network, proxy, storage drivers, a log shipper.
DAEMONSETS_CPU_MILLI = 300
DAEMONSETS_MEMORY_MIB = 700


@dataclass(frozen=True, kw_only=True)
class PodSize:
    """One pod: what it asks for, which is also what it is held to."""

    cpus: int  # hardware threads, whole cores of them
    threads_per_core: int
    memory_gib: int
    instances: tuple[Instance, ...]  # any of which has room for it; the first decided its size
    reason: str

    @property
    def cores(self) -> int:
        return self.cpus // self.threads_per_core

    @property
    def memory_bytes(self) -> int:
        return self.memory_gib * 2**30


@dataclass(frozen=True, kw_only=True)
class SpotPrices:
    """What spot machines cost now, by type."""

    usd_per_hour: Mapping[str, float]
    words: str  # where and when


def room_for_a_pod(instance: Instance) -> tuple[int, int]:
    """CPUs (whole cores) and GiB that a type leaves to a single pod."""
    if instance.allocatable_cpu_milli is None or instance.allocatable_memory_mib is None:
        return 0, 0
    threads = max(1, instance.vcpus // instance.cores)
    # The kubelet hands out whole CPUs, less those that what it reserves begins on.
    whole = (instance.allocatable_cpu_milli - DAEMONSETS_CPU_MILLI) // 1000
    memory_gib = (instance.allocatable_memory_mib - DAEMONSETS_MEMORY_MIB) // 1024
    return max(0, whole // threads * threads), max(0, memory_gib)


def instances_of(config: RunConfig) -> tuple[Instance, ...]:
    """The types that the run file names for its pods; none: the plan chooses."""
    listed = config.kubernetes.instances
    names = listed or ([] if config.fleet.instance is None else [config.fleet.instance])
    where = "kubernetes.instances" if listed else "fleet.instance"
    return tuple(dict.fromkeys(instance_named(name, where=where) for name in names))


def pod_size(section: KubernetesSection, instances: Sequence[Instance]) -> PodSize:
    """The largest pod that each of the types has room for, or the one that is asked for."""
    rooms = {one.name: room_for_a_pod(one) for one in instances}
    smallest = min(instances, key=lambda one: (rooms[one.name][1], rooms[one.name][0], one.name))
    cpus, memory_gib = (min(room[part] for room in rooms.values()) for part in (0, 1))
    if cpus == 0 or memory_gib == 0:
        without = next(one for one in instances if 0 in rooms[one.name])
        raise InputError(
            f"{without.name} has no room for a pod with cores of its own",
            where=f"{'kubernetes.instances' if section.instances else 'fleet.instance'}: {without.name}",
            why=f"{_left_over(without)}; a pod gets whole cores and whole GiB",
            do="name a larger type: `coremill instances` lists them with what pods get",
        )
    wanted_cpus = cpus if section.cpus == AUTO else section.cpus
    wanted_gib = memory_gib if section.memory_gib == AUTO else section.memory_gib
    if wanted_cpus > cpus or wanted_gib > memory_gib:
        raise _too_large(section, smallest, wanted_cpus, wanted_gib)
    threads = max(1, smallest.vcpus // smallest.cores)
    return PodSize(
        cpus=wanted_cpus,
        threads_per_core=threads,
        memory_gib=wanted_gib,
        instances=(smallest, *(one for one in instances if one is not smallest)),
        reason=_reason(section, smallest, rooms, wanted_cpus // threads),
    )


def pods_of(
    config: RunConfig, *, nodes: int | None = None, instances: Sequence[Instance] = (), spot: SpotPrices | None = None
) -> Fleet:
    """The machines of a run in pods: as many, each as large, as the run file has it; types as given, or as named."""
    nodes = nodes or config.fleet.nodes
    size = pod_size(config.kubernetes, instances or instances_of(config))
    instance = size.instances[0]
    node, first = node_facts_of(instance), max(0, instance.cores - room_for_a_pod(instance)[0] // size.threads_per_core)
    whole = assumed_calibration(instance)
    share = size.cores / instance.cores
    bf16 = whole.bf16_matmul_flops_per_second
    usd_per_hour, words = price_of_pods(config.kubernetes, size.instances, nodes, spot)
    others = f" or {', '.join(one.name for one in size.instances[1:])}" if len(size.instances) > 1 else ""
    return Fleet(
        nodes=nodes,
        # The cores with the lowest numbers are kept for the system.
        node=replace(node, cores=node.cores[first : first + size.cores], memory_limit_bytes=size.memory_bytes),
        calibration=replace(
            whole,
            threads=size.cores,
            origin=whole.origin.replace(f"{instance.cores} cores", f"{size.cores} cores", 1),
            fp32_matmul_flops_per_second=share * whole.fp32_matmul_flops_per_second,
            bf16_matmul_flops_per_second=None if bf16 is None else share * bf16,
        ),
        name=f"{nodes} x {instance.name}{others}, in pods",
        link_bits_per_second=min(one.network_baseline_gbps for one in size.instances) * 1e9,
        link_flow_bits_per_second=FLOW_BITS_PER_SECOND,
        usd_per_hour=usd_per_hour,
        memory_bytes_per_node=size.memory_bytes,
        pod=f"{size.cpus} CPUs, {size.memory_gib} GiB",
        pod_reason=size.reason,
        price_words=words,
    )


def largest_room() -> Instance:
    """The type that leaves most memory to a pod."""
    return max(all_instances(), key=lambda one: room_for_a_pod(one)[1])


def cheapest_with_room(cpus: int, memory_gib: int) -> Instance | None:
    """The cheapest type that has room for a pod of this size; bare metal and burstable ones are left out."""
    fitting = [
        one
        for one in all_instances()
        if one.usd_per_hour is not None
        and not one.bare_metal
        and not one.is_flex
        and room_for_a_pod(one)[0] >= cpus
        and room_for_a_pod(one)[1] >= memory_gib
    ]
    return min(fitting, key=lambda one: (one.usd_per_hour or 0.0, one.name), default=None)


def price_of_pods(
    section: KubernetesSection, instances: Sequence[Instance], nodes: int, spot: SpotPrices | None = None
) -> tuple[float | None, str]:
    """Of all pods by the hour, at the dearest of the types; and what price that is."""
    elsewhere = "" if section.region in (None, table().region) else f"{section.region} has its own, "
    on_demand = f"on-demand price of {table().region}, {elsewhere}{table().price_date}"
    dearest = ", of the dearest type listed" if len(instances) > 1 else ""
    if spot is not None and section.may_be_spot:
        known = [spot.usd_per_hour[one.name] for one in instances if one.name in spot.usd_per_hour]
        if known:
            return nodes * max(known), f"{spot.words}{dearest}"
    prices = [one.usd_per_hour for one in instances]
    usd_per_hour = None if None in prices else nodes * max(price for price in prices if price is not None)
    if section.may_be_spot:
        words = f"{on_demand}{dearest}: an upper bound, spot costs less; coremill plan --live asks what it costs now"
        return usd_per_hour, words
    if section.capacity == "reservation":
        return usd_per_hour, f"{on_demand}{dearest}: an upper bound, a reservation is paid by its own terms"
    return usd_per_hour, f"{on_demand}{dearest}"


def _left_over(instance: Instance) -> str:
    if instance.allocatable_cpu_milli is None or instance.allocatable_memory_mib is None:
        return f"what Kubernetes leaves to pods on {instance.name} is not known"
    return (
        f"{instance.name} has {instance.vcpus} CPUs and {instance.memory_mib / 1024:g} GiB; kubelet and system leave"
        f" {instance.allocatable_cpu_milli / 1000:g} and {instance.allocatable_memory_mib / 1024:.1f}, agents on the"
        f" node (DaemonSets) take {DAEMONSETS_CPU_MILLI / 1000:g} and {DAEMONSETS_MEMORY_MIB / 1024:.1f}"
    )


def _reason(section: KubernetesSection, smallest: Instance, rooms: Mapping[str, tuple[int, int]], cores: int) -> str:
    threads = max(1, smallest.vcpus // smallest.cores)
    in_cores = f"{cores} whole cores of {threads} CPUs" if threads > 1 else f"{cores} whole cores"
    words = f"{_left_over(smallest)}: {in_cores}"
    if section.cpus != AUTO or section.memory_gib != AUTO:
        words = (
            f"set by you; {smallest.name} has room for {rooms[smallest.name][0]} CPUs, {rooms[smallest.name][1]} GiB"
        )
    if len(rooms) > 1:
        words += "; the other types have as much or more"
    return words


def _too_large(section: KubernetesSection, smallest: Instance, cpus: int, memory_gib: int) -> InputError:
    room = room_for_a_pod(smallest)
    key = "kubernetes.cpus" if cpus > room[0] else "kubernetes.memory_gib"
    cheapest = cheapest_with_room(cpus, memory_gib)
    if cheapest is None:
        largest = largest_room()
        most_cpus, most_gib = room_for_a_pod(largest)
        do = f"ask for less: the largest type, {largest.name}, has room for {most_cpus} CPUs and {most_gib} GiB"
        what = f"a pod of {cpus} CPUs and {memory_gib} GiB is larger than any node"
    else:
        do = (
            f"leave cpus and memory_gib out and take {room[0]} CPUs and {room[1]} GiB of {smallest.name}"
            f" ({smallest.usd_per_hour or 0:.3f} $/h), or name {cheapest.name} ({cheapest.usd_per_hour:.3f} $/h)"
        )
        what = f"a pod of {cpus} CPUs and {memory_gib} GiB does not fit on {smallest.name}"
    return InputError(what, where=key, why=_left_over(smallest), do=do)
