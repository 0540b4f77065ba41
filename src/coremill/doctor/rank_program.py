"""One rank of the self-test: joins a group of two over gloo, adds numbers, and does one training step.

Started twice by self_test.py with the usual rank variables. The last line on stdout is what was found, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

from coremill.child import die_with_parent
from coremill.hardware.probe import environment_snapshot

PAYLOAD_BYTES = 16 * 2**20


def main() -> int:
    """Runs all checks of this rank."""
    die_with_parent()
    environ = environment_snapshot()
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    timeout = timedelta(seconds=float(environ["COREMILL_SELF_TEST_SECONDS"]))

    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    store = TCPStore(
        environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), world_size, is_master=rank == 0, timeout=timeout
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        result = {"rank": rank, **_all_reduce(world_size), **_training_step(rank, world_size)}
        dist.barrier()
    finally:
        dist.destroy_process_group()
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return 0


def _all_reduce(world_size: int) -> dict[str, Any]:
    """A sum that every rank can check, and how fast it was."""
    import torch
    import torch.distributed as dist

    # Different on each rank, exact in fp32: element i is i mod 1024 times rank + 1.
    numbers = torch.arange(PAYLOAD_BYTES // 4, dtype=torch.int64).remainder(1024).float()
    expected = numbers * (world_size * (world_size + 1) // 2)
    is_right, best_seconds = True, float("inf")
    for _ in range(3):
        mine = numbers * (dist.get_rank() + 1)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(mine)
        best_seconds = min(best_seconds, time.perf_counter() - started)
        is_right = is_right and bool(torch.equal(mine, expected))
    return {"all_reduce_is_right": is_right, "all_reduce_bytes_per_second": PAYLOAD_BYTES / best_seconds}


def _training_step(rank: int, world_size: int) -> dict[str, Any]:
    """One step of a tiny Llama on rows of its own, gradients averaged: then all ranks must hold the same weights."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
    )
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3, fused=True)
    rows = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(rank + 1))
    started = time.perf_counter()
    loss = replica(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - started
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    weights = [torch.empty_like(after) for _ in range(world_size)]
    dist.all_gather(weights, after)
    return {
        "loss": float(loss),
        "loss_is_finite": bool(torch.isfinite(loss)),
        "weights_moved": not torch.equal(before, after),
        "weights_are_equal": all(torch.equal(weights[0], other) for other in weights),
        "step_seconds": seconds,
        # torch switches oneDNN off for the process after a product it cannot do; from then on all are slow.
        "onednn_was_lost": bool(torch._C._has_mkldnn and not torch.backends.mkldnn.enabled),
    }


if __name__ == "__main__":
    sys.exit(main())
