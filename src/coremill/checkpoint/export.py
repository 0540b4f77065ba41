"""Leaves the model as a plain Hugging Face folder that `AutoModelForCausalLM` loads, with identical logits.

The mirror of loading: sizes are known beforehand, so the header is written first, and then rank 0 streams rows to the
file as they come, its own and the other ranks', a few megabytes at a time. No rank ever holds the whole model
(export_folder.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from coremill.checkpoint.export_adapter import AdapterExport, Form, adapter_export_writer, parameters_by_shape
from coremill.checkpoint.export_folder import (
    FolderWriter,
    Weights,
    make_blueprint,
    model_writer,
    pieces_of,
    tensors_to_write,
)
from coremill.checkpoint.snapshot import buffers_of
from coremill.engines.base import Engine
from coremill.model.slices import RowSlice, rows_of_rank
from coremill.model.source import ModelFolder
from coremill.plan.memory import EXPORT_PIECE_BYTES
from coremill.plan.types import Choice
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
    form: Choice[Form] = Choice("model", "all weights were trained")


@torch.no_grad()
def export_model(
    model: nn.Module,
    source: ModelFolder,
    tokenizer_folder: Path | None,
    destination: Path,
    *,
    world: World,
    dtype: torch.dtype = torch.float32,
    end_ids: Sequence[int] = (),
) -> ExportReport:
    """Write the model to a folder; every rank takes part, and the folder is there only once it is whole."""
    started = time.perf_counter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    blueprint = make_blueprint(source)
    tensors = tensors_to_write(model, blueprint)
    weights = Weights(tensors, lambda name: _rows(tensors[name], world), writes=world.rank == 0)
    writer = model_writer(source, tokenizer_folder, blueprint, weights, dtype, end_ids=end_ids)
    _write(writer, destination, world)
    return ExportReport(destination, writer.total_bytes, time.perf_counter() - started, tuple(writer.files))


@torch.no_grad()
def export_trained(
    engine: Engine,
    model: nn.Module,
    wanted: AdapterExport,
    source: ModelFolder,
    tokenizer_folder: Path | None,
    destination: Path,
    *,
    world: World,
    end_ids: Sequence[int] = (),
) -> ExportReport:
    """The same of a run with adapters: what was trained beside the model, or both in one."""
    started = time.perf_counter()
    pieces, buffers = {piece.name: piece for piece in engine.slices()}, buffers_of(model)

    def rows(name: str) -> Iterator[torch.Tensor]:
        return _rows(buffers[name], world) if name in buffers else _rows_of_slice(pieces[name], world)

    tensors = parameters_by_shape({name: piece.shape for name, piece in pieces.items()})
    trained = Weights({**tensors, **buffers}, rows, writes=world.rank == 0)
    writer, form = adapter_export_writer(wanted, source, tokenizer_folder, trained, None, end_ids=end_ids)
    _write(writer, destination, world)
    seconds = time.perf_counter() - started
    return ExportReport(destination, writer.total_bytes, seconds, tuple(writer.files), form=form)


def _write(writer: FolderWriter, destination: Path, world: World) -> None:
    with HEARTBEAT.work("exporting", writer.total_bytes if world.rank == 0 else 0):
        writer.write(destination, HEARTBEAT.advance)
    world.barrier()


def _rows_of_slice(piece: RowSlice, world: World) -> Iterator[torch.Tensor]:
    """The same of what an engine trains, which is fp32: ranks hold all rows of it, or each its own."""
    local = piece.local.detach().reshape(-1)
    is_cut = piece.start > 0 if world.rank else piece.stop < (piece.shape[0] if piece.shape else 1)
    if is_cut:
        yield from _gathered(local, piece.shape, world.group, world)
    elif world.rank == 0:
        yield from pieces_of(local)


def _rows(tensor: torch.Tensor, world: World) -> Iterator[torch.Tensor]:
    """All elements of a tensor on rank 0, piece by piece in order; on the other ranks nothing, they send their rows."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach().reshape(-1)
        yield from _gathered(local, tuple(tensor.shape), tensor.device_mesh.get_group(), world)
    elif world.rank == 0:
        yield from pieces_of(tensor.detach().reshape(-1))


def _gathered(
    local: torch.Tensor, shape: tuple[int, ...], group: dist.ProcessGroup | None, world: World
) -> Iterator[torch.Tensor]:
    step = EXPORT_PIECE_BYTES // local.element_size()
    if world.rank != 0:
        for piece in pieces_of(local):
            with peer_errors():
                dist.send(piece.contiguous(), group=group, group_dst=0)
        return
    yield from pieces_of(local)
    row_elements = math.prod(shape[1:])
    buffer = torch.empty(step, dtype=local.dtype)
    for rank in range(1, world.size):
        start, stop = rows_of_rank(shape[0], rank, world.size)
        remaining = (stop - start) * row_elements
        while remaining:
            piece = buffer[: min(step, remaining)]
            with peer_errors():
                dist.recv(piece, group=group, group_src=rank)
            yield piece
            remaining -= piece.numel()
