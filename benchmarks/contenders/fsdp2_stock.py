"""(c) Stock FSDP2: `fully_shard` on each decoder layer and on the whole, fused AdamW, gloo, packed rows."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from benchmarks import workload
from benchmarks.contenders.measure import StepRecorder, parse_arguments


def main() -> None:
    """Train for a few steps and leave the record."""
    arguments = parse_arguments(__doc__ or "")
    work = workload.load(arguments.workload)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # torchrun sets OMP_NUM_THREADS; said again here because some BLAS builds take all cores where torch is not told.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    recorder = StepRecorder()
    recorder.loading()
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    model.config.use_cache = False
    mesh = init_device_mesh("cpu", (ranks,))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if arguments.dtype == "bf16"
        else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, fused=True)

    rows = np.load(arguments.ordered_rows or work.packed_rows, mmap_mode="r")
    order = np.random.default_rng(arguments.seed).permutation(len(rows))
    if arguments.ordered_rows:
        order = np.arange(len(rows))
    rows_per_step = arguments.rows_per_rank * ranks
    dist.barrier()
    recorder.begin()
    for step in range(arguments.steps):
        first = step * rows_per_step + rank * arguments.rows_per_rank
        batch = torch.from_numpy(rows[np.sort(order[first : first + arguments.rows_per_rank])].astype(np.int64))
        recorder.count(batch.numel(), batch.numel())
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
        recorder.losses.append(float(mean_loss))
        recorder.end_step()
    recorder.write(arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
