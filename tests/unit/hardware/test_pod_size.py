"""A pod is not its instance: what it gets, what is refused, and what the seeds' request costs beside ours."""

from __future__ import annotations

import pytest

from coremill.config.kubernetes_section import KubernetesSection
from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.hardware.instances import all_instances, instance_named
from coremill.hardware.pods import (
    DAEMONSETS_CPU_MILLI,
    DAEMONSETS_MEMORY_MIB,
    SpotPrices,
    cheapest_with_room,
    pod_size,
    pods_of,
    room_for_a_pod,
)


def in_pods(**section: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "fleet": {"nodes": 4, "instance": "c7i.8xlarge"},
            "kubernetes": {"image": "a:1", "cluster": "demo", "role": "nodes"} | section,
        }
    )


@pytest.mark.parametrize(
    ("name", "cpus", "gib"),
    [("c7i.8xlarge", 30, 55), ("m7i.8xlarge", 30, 114), ("c7i.16xlarge", 62, 109), ("c8i.96xlarge", 382, 693)],
)
def test_what_a_type_leaves_to_a_pod(name: str, cpus: int, gib: int) -> None:
    size = pod_size(KubernetesSection(), [instance_named(name)])
    assert (size.cpus, size.memory_gib, size.cores) == (cpus, gib, cpus // 2)
    assert name in size.reason and "DaemonSets" in size.reason


def test_a_pod_always_fits_its_node_with_whole_cores() -> None:
    for one in all_instances():
        cpus, gib = room_for_a_pod(one)
        threads = one.vcpus // one.cores
        assert cpus % threads == 0
        if cpus and gib:
            assert one.allocatable_cpu_milli is not None and one.allocatable_memory_mib is not None
            assert 1000 * cpus + DAEMONSETS_CPU_MILLI <= one.allocatable_cpu_milli
            assert 1024 * gib + DAEMONSETS_MEMORY_MIB <= one.allocatable_memory_mib
            # The static policy keeps whole CPUs for what is reserved.
            reserved = -(-(1000 * one.vcpus - one.allocatable_cpu_milli) // 1000)
            assert cpus <= one.vcpus - reserved


def test_of_several_types_the_pod_fits_each() -> None:
    section = KubernetesSection(instances=["m7i.8xlarge", "c7i.8xlarge", "c8i.8xlarge"])
    size = pod_size(section, [instance_named(name) for name in section.instances])
    assert size.cpus == 30 and size.memory_gib == min(room_for_a_pod(one)[1] for one in size.instances) == 52
    assert size.instances[0].name == "c8i.8xlarge" and "other types" in size.reason


def test_the_plan_counts_with_the_cores_of_the_pod() -> None:
    fleet = pods_of(in_pods())
    assert len(fleet.node.cores) == 15 and 0 not in {cpu for core in fleet.node.cores for cpu in core.cpus}
    assert fleet.limit_bytes_per_node == 55 * 2**30 and fleet.calibration.threads == 15
    assert fleet.calibration.bf16_matmul_flops_per_second == pytest.approx(15 * 0.27e12)
    two_sockets = pods_of(in_pods(), instances=[instance_named("c7i.48xlarge")])
    by_socket = [sum(core.numa_node == numa for core in two_sockets.node.cores) for numa in (0, 1)]
    assert by_socket == [47, 48]  # the system's core is on the first


def test_refusals_say_what_there_is_and_what_to_take() -> None:
    with pytest.raises(InputError) as small:
        pod_size(KubernetesSection(), [instance_named("c7i.large")])
    assert small.value.exit_code == 78 and "no room" in small.value.what and "1.93" in (small.value.why or "")
    with pytest.raises(InputError) as large:
        pod_size(KubernetesSection(cpus=32, memory_gib=64), [instance_named("c7i.8xlarge")])
    assert large.value.where == "kubernetes.cpus" and "31.85" in (large.value.why or "")
    assert "30 CPUs and 55 GiB" in (large.value.do or "") and "c7i.12xlarge" in (large.value.do or "")
    with pytest.raises(InputError, match="larger than any node") as none:
        pod_size(KubernetesSection(memory_gib=40_000), [instance_named("c7i.8xlarge")])
    assert none.value.where == "kubernetes.memory_gib" and "u7in-32tb" in (none.value.do or "")


def test_the_seeds_request_is_half_as_dear_again_as_ours() -> None:
    """Four pods of Llama-3-8B: 32 CPUs and 64 GiB each, as the tutorial asks, fit no 8xlarge."""
    theirs, ours = cheapest_with_room(32, 64), pods_of(in_pods())
    assert theirs is not None and theirs.usd_per_hour is not None and ours.usd_per_hour is not None
    assert (4 * theirs.usd_per_hour, ours.usd_per_hour) == (pytest.approx(8.568), pytest.approx(5.712))
    assert 1 - ours.usd_per_hour / (4 * theirs.usd_per_hour) == pytest.approx(1 / 3)


def test_which_price_it_is_is_said() -> None:
    assert pods_of(in_pods()).price_words == "on-demand price of us-east-1, 2026-07-20"
    spot = pods_of(in_pods(capacity="spot", zone="eu-west-1b"))
    assert spot.usd_per_hour == pytest.approx(5.712)
    assert "upper bound" in (spot.price_words or "") and "eu-west-1 has its own" in (spot.price_words or "")
    live = SpotPrices(usd_per_hour={"c7i.8xlarge": 0.5}, words="spot price in us-west-2a, now")
    now = pods_of(in_pods(capacity="spot"), spot=live)
    assert (now.usd_per_hour, now.price_words) == (2.0, "spot price in us-west-2a, now")
    several = pods_of(in_pods(instances=["c7i.8xlarge", "m7i.8xlarge"]))
    assert several.usd_per_hour == pytest.approx(4 * 1.6128) and "dearest" in (several.price_words or "")
