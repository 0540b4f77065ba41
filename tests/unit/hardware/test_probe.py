from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from coremill.errors import InputError
from coremill.hardware.facts import Core
from coremill.hardware.probe import (
    BusyWatch,
    busy_fraction,
    cache_folder,
    environment_snapshot,
    find_library,
    library_folders,
    probe_node,
    read_clock_driver,
    read_governor,
    read_huge_pages,
    read_interfaces,
    read_memory,
)
from unit.hardware.fake_machine import FakeMachine


def test_a_pod_on_a_large_machine(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.two_sockets("split")
    machine.memory(64 * 2**20, 60 * 2**20)
    machine.write("proc/self/cgroup", "0::/pod\n")
    machine.write("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    machine.write("sys/fs/cgroup/pod/cpu.max", "350000 100000\n")
    machine.write("sys/fs/cgroup/pod/memory.max", f"{16 * 2**30}\n")
    machine.write("sys/fs/cgroup/pod/memory.current", f"{2**30}\n")
    machine.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    node = probe_node(tmp_path, mask=range(4, 16), busy_seconds=0)
    assert node.cpu_model == "Intel(R) Xeon(R) Platinum 8488C"
    assert node.architecture == "x86_64"
    assert len(node.cores) == 8  # four of them with one sibling only
    assert node.numa_nodes == (0, 1)
    assert node.cpu_quota == 3.5
    assert node.usable_cores == 3
    assert node.memory_bytes == 16 * 2**30
    assert node.memory_available_bytes == 15 * 2**30
    assert node.has_bf16_units
    assert node.huge_pages == "never"
    assert node.busy_fraction == 0


def test_an_empty_root_gives_a_poor_but_valid_result(tmp_path: Path) -> None:
    node = probe_node(tmp_path, mask={0, 1}, busy_seconds=0.01)
    assert node.usable_cores == 2
    assert node.isa == ()
    assert node.memory_total_bytes > 0  # psutil
    assert node.cpu_quota is None
    assert node.huge_pages is None
    assert node.busy_fraction == 0


def test_this_machine() -> None:
    node = probe_node()
    assert {cpu for core in node.cores for cpu in core.cpus} <= set(range(4096))
    if hasattr(os, "sched_getaffinity"):
        assert {cpu for core in node.cores for cpu in core.cpus} == os.sched_getaffinity(0)
    assert 0 < node.memory_available_bytes <= node.memory_total_bytes
    assert 0 <= node.busy_fraction <= 1


def test_memory_of_an_old_kernel(tmp_path: Path) -> None:
    FakeMachine(tmp_path).write("proc/meminfo", "MemTotal: 100 kB\nMemFree: 10 kB\nCached: 5 kB\n")
    assert read_memory(tmp_path) == (102400, 15360)


def test_huge_pages_and_clock(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    assert (read_huge_pages(tmp_path), read_governor(tmp_path), read_clock_driver(tmp_path)) == (None, None, None)
    machine.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    machine.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    machine.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "intel_pstate\n")
    assert read_huge_pages(tmp_path) == "madvise"
    assert read_governor(tmp_path) == "powersave"
    assert read_clock_driver(tmp_path) == "intel_pstate"


def stat(*cpus: tuple[int, int]) -> str:
    """/proc/stat with (busy, idle) ticks per cpu."""
    lines = [f"cpu{number} {busy} 0 0 {idle} 0 0 0 0 0 0" for number, (busy, idle) in enumerate(cpus)]
    return "\n".join(["cpu 1 2 3 4 5 6 7 8 0 0", *lines, "intr 5"]) + "\n"


@pytest.mark.parametrize(
    ("after", "own_seconds", "busy_cores"),
    [
        (((100, 200), (100, 200), (100, 200), (100, 200)), 0.0, 0.0),  # idle
        (((200, 100), (100, 200), (100, 200), (100, 200)), 0.0, 1.0),  # one thread of the first core
        (((200, 100), (200, 100), (100, 200), (100, 200)), 0.0, 1.0),  # both threads: still one core
        (((200, 100), (100, 200), (150, 150), (100, 200)), 0.0, 1.5),
        (((200, 100), (100, 200), (100, 200), (100, 200)), 1.0, 0.0),  # it was this process
        (((200, 100), (100, 200), (200, 100), (100, 200)), 0.25, 1.75),
    ],
)
def test_busy_cores(tmp_path: Path, after: tuple[tuple[int, int], ...], own_seconds: float, busy_cores: float) -> None:
    machine = FakeMachine(tmp_path)
    cores = [Core(cpus=(0, 1), numa_node=0, socket=0), Core(cpus=(2, 3), numa_node=0, socket=0)]
    now, own = iter((10.0, 11.0)), iter((5.0, 5.0 + own_seconds))
    machine.write("proc/stat", stat(*[(100, 100)] * 4))
    watch = BusyWatch(cores, tmp_path, clock=lambda: next(now), own_seconds=lambda: next(own))
    machine.write("proc/stat", stat(*after))
    assert watch.busy_cores() == pytest.approx(busy_cores)


@pytest.mark.parametrize(
    ("busy_cores", "cores", "quota", "fraction"),
    [(0, 8, None, 0), (2, 8, None, 0.25), (32, 64, 4.0, 0), (62, 64, 4.0, 0.5), (64, 64, 4.0, 1.0), (1, 1, 0.5, 1.0)],
)
def test_busy_fraction_is_about_what_we_may_use(
    busy_cores: float, cores: int, quota: float | None, fraction: float
) -> None:
    assert busy_fraction(busy_cores, cores, quota) == pytest.approx(fraction)


def address(family: int, text: str) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=text)


def test_interfaces() -> None:
    v4, v6 = socket.AF_INET, socket.AF_INET6
    addresses = {
        "lo": [address(v4, "127.0.0.1")],
        "ens5": [address(v6, "fe80::1%ens5"), address(v4, "10.0.0.4")],
        "ens6": [address(v6, "fe80::2%ens6")],
        "down": [address(v4, "10.0.0.5")],
        "bare": [],
        "gone": [address(v4, "10.0.0.6")],
    }
    stats = {
        "lo": SimpleNamespace(isup=True, speed=0),
        "ens5": SimpleNamespace(isup=True, speed=12500),
        "ens6": SimpleNamespace(isup=True, speed=-1),
        "down": SimpleNamespace(isup=False, speed=1000),
        "bare": SimpleNamespace(isup=True, speed=65535),
    }
    found = read_interfaces(addresses, stats)
    assert [(face.name, face.address, face.is_loopback, face.bits_per_second) for face in found] == [
        ("ens5", "10.0.0.4", False, 12_500_000_000),
        ("ens6", "fe80::2", False, None),
        ("lo", "127.0.0.1", True, None),
    ]


def elf(machine: int, *, is_64_bit: bool = True) -> bytes:
    return b"\x7fELF" + bytes([2 if is_64_bit else 1]) + bytes(13) + machine.to_bytes(2, "little")


@pytest.mark.parametrize(
    ("architecture", "machine", "folder"),
    [
        ("x86_64", 62, "usr/lib/x86_64-linux-gnu"),
        ("aarch64", 183, "usr/lib/aarch64-linux-gnu"),
        ("x86_64", 62, "usr/lib64"),
        ("aarch64", 183, "usr/local/lib"),
    ],
)
def test_libraries_of_this_architecture(tmp_path: Path, architecture: str, machine: int, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir(parents=True)
    foreign = tmp_path / "usr/lib"
    foreign.mkdir(parents=True, exist_ok=True)
    (foreign / "libjemalloc.so.2").write_bytes(elf(40, is_64_bit=False))
    (place / "libtcmalloc_minimal.so.4").write_bytes(elf(machine))
    (place / "libtcmalloc_minimal_debug.so.4").write_bytes(elf(machine))
    folders = library_folders(architecture, tmp_path)
    assert find_library(("libtcmalloc.so*", "libtcmalloc_minimal.so*"), folders, architecture) == (
        place / "libtcmalloc_minimal.so.4"
    )
    assert find_library(("libjemalloc.so*",), folders, architecture) is None


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"COREMILL_CACHE": "/scratch/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/scratch/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/coremill"),
        ({"COREMILL_CACHE": "", "HOME": "/h"}, "/h/.cache/coremill"),
    ],
)
def test_cache_folder(environ: dict[str, str], folder: str) -> None:
    assert cache_folder(environ) == Path(folder)


def test_a_user_without_a_home_folder_is_told_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that is run by a number, with an empty environment."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(InputError, match="COREMILL_CACHE"):
        cache_folder({})
    assert cache_folder({"COREMILL_CACHE": "/scratch/c"}) == Path("/scratch/c")


def test_environment_snapshot_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREMILL_CACHE", "/somewhere")
    snapshot = environment_snapshot()
    assert snapshot["COREMILL_CACHE"] == "/somewhere"
    snapshot["COREMILL_CACHE"] = "changed"
    assert os.environ["COREMILL_CACHE"] == "/somewhere"
