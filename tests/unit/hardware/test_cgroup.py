from __future__ import annotations

from pathlib import Path

import pytest

from coremill.hardware.cgroup import CgroupLimits, read_cgroup_limits
from unit.hardware.fake_machine import FakeMachine

GIB = 2**30
V1_NO_LIMIT = "9223372036854771712"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
TWO_NODES = {
    f"sys/devices/system/node/node{number}/meminfo": f"Node {number} MemTotal:       {8 * 2**20} kB\n"
    f"Node {number} MemFree:        {5 * 2**20} kB\nNode {number} Inactive(file): {2**20} kB\n"
    for number in (0, 1)
}


def limits(quota: float | None, memory: int | None, free: int | None = None) -> CgroupLimits:
    return CgroupLimits(cpu_quota=quota, memory_limit_bytes=memory, memory_free_bytes=free)


CASES: dict[str, tuple[dict[str, str], CgroupLimits]] = {
    "nothing there": ({}, limits(None, None)),
    "v2, no limits": (
        {
            "proc/self/cgroup": "0::/user.slice\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user.slice/memory.max": "max\n",
        },
        limits(None, None),
    ),
    "v2, own namespace": (
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        },
        limits(2.5, 8 * GIB, 6 * GIB),
    ),
    "v2, the tightest of nested levels counts, memory.high too": (
        {
            "proc/self/cgroup": "0::/kubepods/pod1/box\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/kubepods/cpu.max": "3200000 100000\n",
            "sys/fs/cgroup/kubepods/memory.max": f"{60 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/kubepods/pod1/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod1/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod1/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods/pod1/box/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod1/box/memory.high": f"{15 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod1/box/memory.current": f"{2 * GIB}\n",
        },
        limits(4.0, 15 * GIB, 11 * GIB),
    ),
    "v2, a namespace whose process was moved outside of it": (
        {
            "proc/self/cgroup": "0::/../other\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "100000 100000\n",
        },
        limits(1.0, None),
    ),
    "v1, nested, the huge number means none": (
        {
            "proc/self/cgroup": "4:memory:/slice/job\n3:cpu,cpuacct:/slice/job\n0::/\n",
            "proc/self/mountinfo": (
                "35 33 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
                "36 33 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            ),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/slice/cpu.cfs_quota_us": "600000\n",
            "sys/fs/cgroup/cpu,cpuacct/slice/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/slice/job/cpu.cfs_quota_us": "800000\n",
            "sys/fs/cgroup/cpu,cpuacct/slice/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
            "sys/fs/cgroup/memory/slice/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/slice/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/slice/job/memory.limit_in_bytes": V1_NO_LIMIT,
        },
        limits(6.0, 4 * GIB, 3 * GIB),
    ),
    "v1 container: the host's path, on a mount that begins at the container": (
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/docker/abc\n",
            "proc/self/mountinfo": (
                "35 33 0:32 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
                "36 33 0:33 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
            ),
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        },
        limits(3.0, 2 * GIB),
    ),
    "v1, a limit above the visible part": (
        {
            "proc/self/cgroup": "4:memory:/\n",
            "proc/self/mountinfo": "36 33 0:33 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT,
            "sys/fs/cgroup/memory/memory.stat": f"cache 0\nhierarchical_memory_limit {GIB}\n",
        },
        limits(None, GIB),
    ),
    "hybrid: cpu in v2, memory in v1": (
        {
            "proc/self/cgroup": "4:memory:/job\n1:name=systemd:/job\n0::/job\n",
            "proc/self/mountinfo": (
                "33 25 0:30 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
                "36 33 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                "37 33 0:34 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
                "43 33 0:40 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            ),
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/systemd/job/tasks": "1\n",
            "sys/fs/cgroup/unified/job/cpu.max": "50000 100000\n",
        },
        limits(0.5, 3 * GIB),
    ),
    "no mountinfo, v2 in the usual place": (
        {"sys/fs/cgroup/cgroup.controllers": "cpu memory\n", "sys/fs/cgroup/cpu.max": "700000 100000\n"},
        limits(7.0, None),
    ),
    "no mountinfo, v1 in the usual places": (
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n"},
        limits(None, GIB),
    ),
    "a mount point with a blank": (
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/my\\040groups rw - cgroup2 cgroup2 rw\n",
            "sys/my groups/cpu.max": "200000 100000\n",
        },
        limits(2.0, None),
    ),
    "nonsense in the files": (
        {
            "proc/self/cgroup": "garbage\n0::/\n",
            "proc/self/mountinfo": "short\n" + V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "a b\n",
            "sys/fs/cgroup/memory.max": "lots\n",
        },
        limits(None, None),
    ),
    "a cpuset that keeps memory to one of two NUMA nodes": (
        {**TWO_NODES, "proc/self/status": "Mems_allowed:\t00000001\nMems_allowed_list:\t0\n"},
        limits(None, 8 * GIB, 6 * GIB),
    ),
    "a cpuset of both": ({**TWO_NODES, "proc/self/status": "Mems_allowed_list:\t0-1\n"}, limits(None, None)),
    "a NUMA node that has cores only": (
        {
            **TWO_NODES,
            "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 0 kB\n",
            "proc/self/status": "Mems_allowed_list:\t0\n",
        },
        limits(None, None),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_limits(tmp_path: Path, case: str) -> None:
    files, expected = CASES[case]
    machine = FakeMachine(tmp_path)
    for path, text in files.items():
        machine.write(path, text)
    assert read_cgroup_limits(tmp_path) == expected
