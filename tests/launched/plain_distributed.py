"""A plain torch.distributed script: sums over ranks, and says which cores its threads may use and were seen on.

python plain_distributed.py [fail]            prints one JSON line per rank
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

NAMES = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "GLOO_SOCKET_IFNAME", "LD_PRELOAD", "OF_THE_USER", "MASTER_ADDR")


def threads() -> dict[str, list[int]]:
    """Over all threads of this process: the cpus they may use, and those they ran on last."""
    allowed: set[int] = set()
    seen: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            status, stat = (task / "status").read_text(), (task / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        text = next(line.split(":")[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            allowed.update(range(int(first), int(last or first) + 1))
        seen.add(int(stat.rsplit(")", 1)[1].split()[36]))
    return {"allowed": sorted(allowed), "seen": sorted(seen)}


def main() -> None:
    """Meet, compute, sum, report."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.randn(256, 256) @ torch.randn(256, 256)  # starts the OpenMP threads
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    entry = {
        "rank": rank,
        "size": size,
        "sum": total.item(),
        "host": socket.gethostname(),
        "local": [int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])],
        "torch_threads": torch.get_num_threads(),
        "arguments": sys.argv[1:],
        "environ": {name: os.environ.get(name) for name in NAMES},
        **threads(),
    }
    print("SAID " + json.dumps(entry), flush=True)
    if sys.argv[1:] == ["fail"] and rank == size - 1:
        raise ValueError("poisoned batch")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
