"""Between a rank's memory and the files of a checkpoint: which rows it writes, and how rows come back to any ranks.

A file holds rows [start, stop) of every parameter and of what the optimizer has beside it, in the dtypes that they have
in memory. Ranks that hold
everything write their part of the rows only, by the rule by which others share them out, so a checkpoint is the same
whichever engine made it, and any number of ranks of any engine reads it by byte range.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from coremill.checkpoint.dropout import dropout_of
from coremill.checkpoint.export_folder import STORED_NAMES
from coremill.checkpoint.manifest import Checkpoint, Manifest, StoredFile
from coremill.checkpoint.store import StoredTensor
from coremill.config.schema import LoraSection
from coremill.data.loader import Loader
from coremill.data.order import order_key
from coremill.engines.base import Engine, ParameterState
from coremill.errors import InputError
from coremill.model.load import LoadReport, fill_parameters, together
from coremill.model.lora_base import Base
from coremill.model.read import TensorReader, dtype_of
from coremill.model.slices import (
    RowSlice,
    has_base_apart,
    is_saved,
    kept,
    model_name,
    named_tensors,
    rows_of_rank,
    slice_of,
)
from coremill.model.source import ModelFolder
from coremill.plan.headers import TensorHeader, read_file_header
from coremill.train.clipping import EarlierNorms
from coremill.train.numerics import NumericsGuard
from coremill.train.scores import Scores
from coremill.world.heartbeat import HEARTBEAT

WEIGHTS, BUFFERS, RNG = "parameters", "buffers", "rng/torch"


def file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True)
class Training:
    """What has a state that must survive."""

    engine: Engine
    model: nn.Module
    loader: Loader[Any]
    guard: NumericsGuard
    scores: Scores = field(default_factory=Scores)
    norms: EarlierNorms = field(default_factory=EarlierNorms)  # to clip by, where weights move inside of backward
    base: Base | None = None  # what the weights are beside of; None: they are all there is
    micro_batch_rows: int | None = None  # dropout is drawn for so many at a time; None: not known


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes: tensors, copied or where they lie, and the rows they are."""

    tensors: list[StoredTensor]
    rows: dict[str, tuple[int, int]]
    updates: int  # of the weights, so far
    updates_apart: dict[str, int]  # of parameters that were moved less often, for want of a use; whole on rank 0

    @property
    def bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors)


@torch.no_grad()
def take_snapshot(training: Training, *, rank: int, world_size: int, copy: bool) -> Snapshot:
    """This rank's part of the state as it is now; with `copy` training may go on at once."""
    tensors: list[StoredTensor] = []
    rows: dict[str, tuple[int, int]] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        kept = tensor.detach().clone() if copy else tensor.detach().contiguous()
        data = memoryview(kept.view(-1).view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
        tensors.append(StoredTensor(name, STORED_NAMES[tensor.dtype], tuple(tensor.shape), data))

    state = training.engine.state()
    for each in state:
        piece = each.rows
        start, stop = rows_of_rank(piece.shape[0] if piece.shape else 1, rank, world_size)
        if start == stop:
            continue
        rows[piece.name] = (start, stop)
        for group, tensor in ((WEIGHTS, piece.local), *each.optimizer.items()):
            part = tensor[start - piece.start : stop - piece.start] if piece.shape else tensor
            add(f"{group}/{piece.name}", part)
    if rank == 0:
        for name, buffer in buffers_of(training.model).items():
            add(f"{BUFFERS}/{name}", buffer.reshape(1) if buffer.dim() == 0 else buffer)
    add(RNG, torch.get_rng_state())
    updates = max((each.updates for each in state), default=0)
    apart = {each.rows.name: each.updates for each in state if 0 < each.updates < updates}
    return Snapshot(tensors, rows, updates, apart)


class CheckpointReader:
    """Reads rows of a checkpoint, whichever files they lie in."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, dict[str, TensorHeader]] = {}
        self._groups_of: dict[str, set[str]] = {}  # by file
        self._reader = TensorReader(checkpoint.folder)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._reader.__exit__(*error)

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def optimizer_groups(self, piece: RowSlice) -> list[str]:
        """What the checkpoint holds of the optimizer beside these rows: nothing where they were never moved."""
        files = [file.name for file in self.checkpoint.manifest.files if _common_rows(file, piece)]
        groups = {group for file in files for group in self._groups(file)} - {WEIGHTS, BUFFERS}
        return sorted(
            group for group in groups if all(f"{group}/{piece.name}" in self._headers(file) for file in files)
        )

    def read(self, group: str, piece: RowSlice, target: torch.Tensor) -> None:
        """The rows of `piece` into `target`."""
        for file in self.checkpoint.manifest.files:
            if common := _common_rows(file, piece):
                start, stop = common
                first = file.rows[piece.name][0]
                header = self._headers(file.name)[f"{group}/{piece.name}"]
                part = target[start - piece.start : stop - piece.start] if piece.shape else target
                self._reader.read_rows(header, start - first, stop - first, part)

    def read_new(self, group: str, piece: RowSlice) -> torch.Tensor:
        """The same into memory of its own: as many rows, as the checkpoint has them."""
        header = self._any_header(group, piece)
        shape = (piece.stop - piece.start, *header.shape[1:]) if piece.shape else header.shape
        target = torch.empty(shape, dtype=dtype_of(header))
        self.read(group, piece, target)
        return target

    def dtype_of(self, group: str, piece: RowSlice) -> torch.dtype:
        """In which it was saved."""
        return dtype_of(self._any_header(group, piece))

    def bytes_of(self, group: str, piece: RowSlice) -> int:
        """What reading that takes."""
        header = self._any_header(group, piece)
        return header.bytes // header.shape[0] * (piece.stop - piece.start) if piece.shape else header.bytes

    def _any_header(self, group: str, piece: RowSlice) -> TensorHeader:
        """Of a file that has rows of it: all have them in one dtype."""
        file = next(file for file in self.checkpoint.manifest.files if _common_rows(file, piece))
        return self._headers(file.name)[f"{group}/{piece.name}"]

    def read_whole(self, file: str, name: str) -> torch.Tensor | None:
        """A tensor that one file holds alone."""
        header = self._headers(file).get(name)
        return None if header is None else self._reader.read_whole(header)

    def _groups(self, file: str) -> set[str]:
        if file not in self._groups_of:
            self._groups_of[file] = {name.partition("/")[0] for name in self._headers(file)}
        return self._groups_of[file]

    def _headers(self, file: str) -> dict[str, TensorHeader]:
        if file not in self._files:
            self._files[file] = read_file_header(self.checkpoint.folder / file)
        return self._files[file]


def _common_rows(file: StoredFile, piece: RowSlice) -> tuple[int, int] | None:
    """First row and end that both have; None: there is none."""
    held = file.rows.get(piece.name, (0, 0))
    start, stop = max(held[0], piece.start), min(held[1], piece.stop)
    return (start, stop) if start < stop else None


def files_needed(model: nn.Module, *, rank: int, world_size: int) -> Callable[[Manifest], set[str]]:
    """What this rank will read of a checkpoint: the rows of a placed module, its buffers, its random numbers."""

    def needed(manifest: Manifest) -> set[str]:
        slices = _slices(model, rank, world_size)
        files = {file.name for file in manifest.files if any(_common_rows(file, piece) for piece in slices)}
        if manifest.world_size == world_size:
            files.add(file_name(rank, world_size))
        if buffers_of(model):
            files.add(file_name(0, manifest.world_size))
        return files

    return needed


def _slices(model: nn.Module, rank: int, world_size: int) -> list[RowSlice]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if is_saved(model, parameter)]
    return [slice_of(model_name(name), kept(parameter), rank, world_size) for name, parameter in named]


def load_parameters(
    model: nn.Module,
    source: ModelFolder,
    checkpoint: Checkpoint | None,
    lora: LoraSection,
    start_from: Path | None,
    *,
    seed: int,
    rank: int,
    world_size: int,
) -> LoadReport:
    """Where a run begins or goes on: the model's files, or the checkpoint; with adapters the base from the one and what
    is trained from the other. `start_from` is an adapter to begin with."""
    reports = []
    if checkpoint is None and lora.start_from is not None and start_from is None:
        raise InputError(
            f"the run begins anew, for no checkpoint could be used, but {lora.start_from} is not there any more",
            where="lora.start_from",
            do="bring it back, or repair the checkpoints",
        )
    if checkpoint is None or has_base_apart(model):
        begins_with = str(start_from) if checkpoint is None and start_from is not None else None
        lora = lora.model_copy(update={"start_from": begins_with})
        reports.append(fill_parameters(model, source, rank=rank, world_size=world_size, seed=seed, lora=lora))
    if checkpoint is not None:
        reports.append(restore_parameters(model, checkpoint, rank=rank, world_size=world_size))
    return together(reports)


@torch.no_grad()
def restore_parameters(model: nn.Module, checkpoint: Checkpoint, *, rank: int, world_size: int) -> LoadReport:
    """Fill a placed module from a checkpoint, but for a base that lies elsewhere: this rank's rows only."""
    started = time.perf_counter()
    slices = _slices(model, rank, world_size)
    _check_shapes(slices, checkpoint)
    total_bytes = sum(piece.bytes for piece in slices)
    with HEARTBEAT.work("reading the checkpoint", total_bytes), CheckpointReader(checkpoint) as reader:
        for piece in slices:
            reader.read(WEIGHTS, piece, piece.local)
        first_file = file_name(0, checkpoint.manifest.world_size)
        for name, buffer in buffers_of(model).items():
            stored = reader.read_whole(first_file, f"{BUFFERS}/{name}")
            if stored is not None:
                buffer.copy_(stored.view(buffer.shape))
        bytes_read = reader.bytes_read
    return LoadReport(
        bytes_read=bytes_read,
        tensor_bytes=sum(torch.Size(piece.shape).numel() * piece.local.element_size() for piece in slices),
        seconds=time.perf_counter() - started,
        largest_slice_bytes=max((piece.bytes for piece in slices), default=0),
        initialised=(),
        unexpected=(),
        converted=(),
    )


@torch.no_grad()
def restore_optimizer(engine: Engine, checkpoint: Checkpoint) -> None:
    """Give the engine back what it held beside the weights."""
    saved = checkpoint.state()
    apart: dict[str, int] = saved.get("updates_apart", {})
    with CheckpointReader(checkpoint) as reader:
        trained = [piece for piece in engine.slices() if piece.local.requires_grad and piece.local.numel()]
        groups = {}
        for piece in trained:
            HEARTBEAT.mark()  # slow storage may take long over many headers
            groups[piece.name] = reader.optimizer_groups(piece)
        total_bytes = sum(reader.bytes_of(group, piece) for piece in trained for group in groups[piece.name])
        updates = {piece.name: apart.get(piece.name, saved["updates"]) for piece in trained}
        with HEARTBEAT.work("reading the checkpoint", total_bytes):
            engine.restore(_SavedStates(reader, trained, groups, updates))


@dataclass(frozen=True)
class _SavedStates(Sequence[ParameterState]):
    """Read one at a time: what has to be converted is there twice then, of one parameter."""

    reader: CheckpointReader
    pieces: Sequence[RowSlice]
    groups: Mapping[str, Sequence[str]]
    updates: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.pieces)

    @overload
    def __getitem__(self, index: int) -> ParameterState: ...
    @overload
    def __getitem__(self, index: slice) -> list[ParameterState]: ...
    def __getitem__(self, index: int | slice) -> ParameterState | list[ParameterState]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        piece = self.pieces[index]
        held = {group: self.reader.read_new(group, piece) for group in self.groups[piece.name]}
        return ParameterState(piece, held, self.updates[piece.name])


def progress_of(training: Training, step: int) -> dict[str, Any]:
    """What `restore_progress` needs beside tensors."""
    dropout = dropout_of(training.model, training.micro_batch_rows)
    return {
        "loader": training.loader.state(),
        "numerics": training.guard.state(),
        "gradient_norms": training.norms.state(),
        "evaluations": training.scores.state(step),
        **({} if training.base is None else {"base": training.base.to_json()}),
        **({} if dropout is None else {"dropout": dropout}),
    }


def restore_progress(
    checkpoint: Checkpoint | None, training: Training, *, rank: int, world_size: int, seed: int
) -> None:
    """Everything but the parameters: the optimizer, place in the data, random numbers; None: the run begins."""
    if checkpoint is not None:
        state = checkpoint.state()
        restore_optimizer(training.engine, checkpoint)
        training.loader.restore(state["loader"])
        training.guard.restore(state.get("numerics", {}))
        training.norms.restore(state.get("gradient_norms", {}))
        training.scores.restore(state.get("evaluations", {}), checkpoint.step)
    restore_rng(checkpoint, rank=rank, world_size=world_size, seed=seed)


def restore_rng(checkpoint: Checkpoint | None, *, rank: int, world_size: int, seed: int) -> None:
    """Go on with the same random numbers where the ranks are the same; else with new ones that depend on the step.

    Each rank has its own: with the same ones, rows of different ranks would lose the same places to dropout."""
    if checkpoint is None or checkpoint.manifest.world_size != world_size:
        step = 0 if checkpoint is None else checkpoint.step
        torch.manual_seed(order_key(seed, step, rank) % 2**63)
        return
    with CheckpointReader(checkpoint) as reader:
        state = reader.read_whole(file_name(rank, world_size), RNG)
    assert state is not None
    torch.set_rng_state(state)


def _check_shapes(slices: Sequence[RowSlice], checkpoint: Checkpoint) -> None:
    wanted = {piece.name: piece.shape for piece in slices}
    stored = dict(checkpoint.manifest.parameters)
    if wanted == stored:
        return
    differing = sorted(name for name in {*wanted, *stored} if wanted.get(name) != stored.get(name))
    raise InputError(
        f"the checkpoint is of another model: {differing[0]} has shape {stored.get(differing[0])} in it,"
        f" {wanted.get(differing[0])} in the model",
        where=str(checkpoint.folder),
        why=f"{len(differing)} parameters differ",
        do="bring the old model back, name another run.folder, or start anew with --fresh",
    )


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the saved state, which few models have."""
    return {name: tensor for name, tensor in named_tensors(model).items() if not isinstance(tensor, nn.Parameter)}
