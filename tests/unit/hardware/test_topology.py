from __future__ import annotations

from pathlib import Path

import pytest

from coremill.hardware.topology import (
    cores_without_sysfs,
    online_cpus,
    parse_cpu_list,
    read_architecture,
    read_cores,
    read_cpu_model,
    read_isa,
)
from unit.hardware.fake_machine import FakeMachine


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)), ("", ()), ("5", (5,)), ("3,1-2", (1, 2, 3)), ("x,4", (4,))],
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("numbering", ["adjacent", "split"])
def test_two_sockets_with_siblings(tmp_path: Path, numbering: str) -> None:
    FakeMachine(tmp_path).two_sockets(numbering)
    cores = read_cores(range(16), tmp_path)
    assert [core.numa_node for core in cores] == [0] * 4 + [1] * 4
    assert [core.socket for core in cores] == [0] * 4 + [1] * 4
    first = (0, 1) if numbering == "adjacent" else (0, 8)
    assert cores[0].cpus == first
    assert sorted(cpu for core in cores for cpu in core.cpus) == list(range(16))


def test_pod_with_one_sibling_of_some_cores(tmp_path: Path) -> None:
    FakeMachine(tmp_path).two_sockets("split")
    cores = read_cores({2, 3, 10, 12}, tmp_path)
    assert [core.cpus for core in cores] == [(2, 10), (3,), (12,)]
    assert [core.numa_node for core in cores] == [0, 0, 1]


def test_old_kernels_use_another_file_name(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.x86(4)
    machine.core([0, 2], socket=0, name="thread_siblings_list")
    machine.core([1, 3], socket=0, name="thread_siblings_list")
    assert [core.cpus for core in read_cores(range(4), tmp_path)] == [(0, 2), (1, 3)]


def test_without_sysfs_cpuinfo_tells_cores_apart(tmp_path: Path) -> None:
    text = "\n".join(f"processor: {cpu}\nphysical id: {cpu // 4}\ncore id: {cpu // 2 % 2}\n" for cpu in range(8))
    FakeMachine(tmp_path).write("proc/cpuinfo", text)
    cores = read_cores(range(8), tmp_path)
    assert [core.cpus for core in cores] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [core.socket for core in cores] == [0, 0, 1, 1]


def test_with_nothing_known_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert [core.cpus for core in read_cores({4, 7}, tmp_path)] == [(4,), (7,)]


def test_arm_virtual_machine_without_package_numbers(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.arm(2)
    for cpu in range(2):
        machine.core([cpu], socket=-1)
    assert {core.socket for core in read_cores(range(2), tmp_path)} == {0}


def test_no_linux_at_all() -> None:
    cores = cores_without_sysfs(8)
    assert len(cores) == 8
    assert {core.numa_node for core in cores} == {0}


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("sse2 avx2 avx512f avx512_bf16 amx_bf16", ("amx_bf16", "avx512_bf16", "avx512f", "avx2")),
        ("sse2 avx2 avx512f", ("avx512f", "avx2")),
        ("sse2", ()),
    ],
)
def test_isa_x86(tmp_path: Path, flags: str, isa: tuple[str, ...]) -> None:
    FakeMachine(tmp_path).x86(2, flags=flags)
    assert read_isa(range(2), tmp_path) == isa
    assert read_architecture(tmp_path) == "x86_64"


def test_isa_arm(tmp_path: Path) -> None:
    FakeMachine(tmp_path).arm(2)
    assert read_isa(range(2), tmp_path) == ("arm_bf16", "sve")
    assert read_architecture(tmp_path) == "aarch64"
    assert read_cpu_model(tmp_path) == "Neoverse-V1"


def test_isa_is_what_all_usable_cpus_share(tmp_path: Path) -> None:
    FakeMachine(tmp_path).write("proc/cpuinfo", "processor: 0\nflags: avx2 avx512f\n\nprocessor: 1\nflags: avx2\n")
    assert read_isa({0}, tmp_path) == ("avx512f", "avx2")
    assert read_isa({0, 1}, tmp_path) == ("avx2",)


def test_unknown_arm_part_is_named_by_its_numbers(tmp_path: Path) -> None:
    FakeMachine(tmp_path).arm(1, part="0xfff")
    assert read_cpu_model(tmp_path) == "ARM implementer 0x41 part 0xfff"


def test_model_name_and_online(tmp_path: Path) -> None:
    FakeMachine(tmp_path).x86(4, model="AMD  EPYC 9R14")
    assert read_cpu_model(tmp_path) == "AMD EPYC 9R14"
    assert online_cpus(tmp_path) == (0, 1, 2, 3)
