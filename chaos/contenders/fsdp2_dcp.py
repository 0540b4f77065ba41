"""FSDP2 with torch's distributed checkpoints: a fresh folder for each, the newest with metadata is gone on from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from chaos.contenders.diary import ROWS, ROWS_PER_RANK, SHAPE, Diary, parse, poison, rows

KEEP = 2


def newest(out: Path) -> Path | None:
    """The highest step whose save got as far as its metadata, which are written last."""
    found = [path for path in out.glob("step-*") if (path / ".metadata").exists()]
    return max(found, key=_step, default=None)


def _step(path: Path) -> int:
    match = re.fullmatch(r"step-(\d+)", path.name)
    assert match
    return int(match[1])


def main() -> None:
    """Train, from the last checkpoint where there is one."""
    orders = parse()
    diary = Diary(orders.out)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    poison(model, orders)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    last = newest(orders.out)
    diary.write("start", resumed_from=None if last is None else str(last))
    if last is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=str(last))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = int(state["step"])
    data = rows()
    for step in range(first + 1, orders.steps + 1):
        start = ((step - 1) * ranks + rank) * ROWS_PER_RANK % ROWS
        batch = data[start : start + ROWS_PER_RANK]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        diary.write("step", step=step, loss=float(mean))
        if step % orders.save_every == 0 or step == orders.steps:
            weights, moments = get_state_dict(model, optimizer)
            folder = orders.out / f"step-{step}"
            dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=str(folder))
            diary.write("save", step=step, saved=True)
            if rank == 0:
                for old in sorted(orders.out.glob("step-*"), key=_step)[:-KEEP]:
                    shutil.rmtree(old)
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    diary.write("end", weights_finite=all(bool(torch.isfinite(tensor).all()) for tensor in locals_))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
