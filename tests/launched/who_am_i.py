"""A script without torch, quick to start: says who it is and which cores it has; `fail` makes the last rank fail."""

from __future__ import annotations

import json
import os
import sys
import time

NAMES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "OF_THE_USER", "MASTER_ADDR", "LD_PRELOAD")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
entry = {
    "rank": rank,
    "size": size,
    "local": [int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])],
    "host": os.uname().nodename,
    "allowed": sorted(os.sched_getaffinity(0)),
    "arguments": sys.argv[1:],
    "environ": {name: os.environ.get(name) for name in NAMES},
}
print("SAID " + json.dumps(entry), flush=True)
if "fail" in sys.argv[1:]:
    if rank == size - 1:
        raise ValueError("poisoned batch")
    time.sleep(600)
if "sleep" in sys.argv[1:]:
    time.sleep(600)
