"""Leaves the model as a plain Hugging Face folder that `AutoModelForCausalLM` loads, with identical logits.

The mirror of loading: sizes are known beforehand, so the header is written first, and then rank 0 streams rows to the
file as they come, its own and the other ranks', a few megabytes at a time. No rank ever holds the whole model
(export_folder.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from coremill.checkpoint.export_folder import FolderWriter, Weights, make_blueprint, pieces_of, tensors_to_write
from coremill.model.slices import rows_of_rank
from coremill.model.source import ModelFolder
from coremill.plan.memory import EXPORT_PIECE_BYTES
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT
from coremill.world.lost_peers import peer_errors


@dataclass(frozen=True)
class ExportReport:
    folder: Path
    bytes: int  # of the tensors
    seconds: float
    files: tuple[str, ...]
    step: int | None = None  # None: as the weights are


@torch.no_grad()
def export_model(
    model: nn.Module,
    source: ModelFolder,
    tokenizer_folder: Path | None,
    destination: Path,
    *,
    world: World,
    dtype: torch.dtype = torch.float32,
) -> ExportReport:
    """Write the model to a folder; every rank takes part, and the folder is there only once it is whole."""
    started = time.perf_counter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    blueprint = make_blueprint(source)
    tensors = tensors_to_write(model, blueprint)
    weights = Weights(tensors, lambda name: _rows(tensors[name], world), writes=world.rank == 0)
    writer = FolderWriter(source, tokenizer_folder, blueprint, weights, dtype)
    with HEARTBEAT.work("exporting", writer.total_bytes if weights.writes else 0):
        writer.write(destination, HEARTBEAT.advance)
    world.barrier()
    return ExportReport(destination, writer.total_bytes, time.perf_counter() - started, tuple(writer.files))


def _rows(tensor: torch.Tensor, world: World) -> Iterator[torch.Tensor]:
    """All elements of a tensor on rank 0, piece by piece in order; on the other ranks nothing, they send their rows."""
    if not isinstance(tensor, DTensor):
        if world.rank == 0:
            yield from pieces_of(tensor.detach().reshape(-1))
        return
    local = tensor.to_local().detach().reshape(-1)
    group = tensor.device_mesh.get_group()
    step = EXPORT_PIECE_BYTES // local.element_size()
    if world.rank != 0:
        for piece in pieces_of(local):
            with peer_errors():
                dist.send(piece.contiguous(), group=group, group_dst=0)
        return
    yield from pieces_of(local)
    row_elements = tensor.numel() // max(1, tensor.shape[0])
    buffer = torch.empty(step, dtype=local.dtype)
    for rank in range(1, world.size):
        start, stop = rows_of_rank(tensor.shape[0], rank, world.size)
        remaining = (stop - start) * row_elements
        while remaining:
            piece = buffer[: min(step, remaining)]
            with peer_errors():
                dist.recv(piece, group=group, group_src=rank)
            yield piece
            remaining -= piece.numel()
