"""A checkpoint as a plain Hugging Face folder, by one process: no ranks, and no more memory than a few rows.

Of a run with adapters that is the adapter, or the model with it added in (export_adapter.py).

The rows of every parameter are read from whichever files hold them and go straight on to the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from coremill.checkpoint.export_adapter import AdapterExport, Form, adapter_export_writer, parameters_by_shape
from coremill.checkpoint.export_folder import FolderWriter, Weights, make_blueprint, model_writer, tensors_to_write
from coremill.checkpoint.manifest import Checkpoint
from coremill.checkpoint.snapshot import BUFFERS, WEIGHTS, CheckpointReader, file_name
from coremill.errors import InputError
from coremill.model.slices import RowSlice, named_tensors
from coremill.model.source import ModelFolder
from coremill.plan.memory import EXPORT_PIECE_BYTES
from coremill.plan.types import Choice


def writer_of(
    reader: CheckpointReader,
    source: ModelFolder,
    tokenizer_folder: Path | None,
    *,
    dtype: torch.dtype | None,
    adapters: AdapterExport | None,
    end_ids: Sequence[int] = (),
) -> tuple[FolderWriter, Choice[Form]]:
    """What writes a checkpoint, and in which form; its files are opened as they are read, through `reader`.

    Without a `dtype` an adapter is fp32, and a merged model as the files of its base."""
    if adapters is None:
        writer = _whole_writer(reader, source, tokenizer_folder, dtype or torch.float32, end_ids)
        return writer, Choice("model", "all weights were trained")
    parameters = parameters_by_shape(reader.checkpoint.manifest.parameters)
    buffers = {
        name: tensor
        for name, tensor in named_tensors(make_blueprint(source)).items()
        if not isinstance(tensor, nn.Parameter)
    }

    def pieces(name: str) -> Iterator[torch.Tensor]:
        if name in buffers:
            return _buffer(reader, name, buffers[name])
        return _rows(reader, name, tuple(parameters[name].shape))

    weights = Weights({**parameters, **buffers}, pieces)
    return adapter_export_writer(adapters, source, tokenizer_folder, weights, dtype, end_ids=end_ids)


def _whole_writer(
    reader: CheckpointReader,
    source: ModelFolder,
    tokenizer_folder: Path | None,
    dtype: torch.dtype,
    end_ids: Sequence[int],
) -> FolderWriter:
    blueprint = make_blueprint(source)
    stored = _stored_names(blueprint, reader.checkpoint)
    tensors = tensors_to_write(blueprint, blueprint)

    def pieces(name: str) -> Iterator[torch.Tensor]:
        if isinstance(tensors[name], nn.Parameter):
            return _rows(reader, stored[name], tuple(tensors[name].shape))
        return _buffer(reader, name, tensors[name])

    return model_writer(source, tokenizer_folder, blueprint, Weights(tensors, pieces), dtype, end_ids=end_ids)


def _stored_names(blueprint: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """By every name of a parameter the one under which it was saved: a tied one was saved once."""
    saved = checkpoint.manifest.parameters
    names = {name: tensor for name, tensor in named_tensors(blueprint).items() if isinstance(tensor, nn.Parameter)}
    of_tensor = {id(tensor): name for name, tensor in names.items() if saved.get(name) == tuple(tensor.shape)}
    missing = [name for name, tensor in names.items() if id(tensor) not in of_tensor]
    if missing or len(of_tensor) != len(saved):
        unknown = sorted(set(saved) - set(of_tensor.values()))
        raise InputError(
            f"the checkpoint is of another model: {(missing or unknown)[0]} is not the same in both",
            where=str(checkpoint.folder),
            do="bring back the model that the run began with (model of config.yaml in the run folder)",
        )
    return {name: of_tensor[id(tensor)] for name, tensor in names.items()}


def _rows(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """All elements of a parameter, so many rows at a time in one buffer."""
    rows, row_shape = (shape[0], shape[1:]) if shape else (1, ())
    row_elements = torch.Size(row_shape).numel()
    at_once = max(1, EXPORT_PIECE_BYTES // (4 * max(1, row_elements)))
    buffer = torch.empty((min(at_once, rows), *row_shape))
    for start in range(0, rows if row_elements else 0, at_once):
        stop = min(start + at_once, rows)
        piece = buffer[: stop - start] if shape else buffer.view(())
        reader.read(WEIGHTS, RowSlice(name, shape, start, stop, piece), piece)
        yield piece.reshape(-1)


def _buffer(reader: CheckpointReader, name: str, as_built: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rank 0 saved it; where it did not, it is as the model makes it."""
    stored = reader.read_whole(file_name(0, reader.checkpoint.manifest.world_size), f"{BUFFERS}/{name}")
    yield (as_built if stored is None else stored).reshape(-1)
