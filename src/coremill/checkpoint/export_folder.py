"""A plain Hugging Face folder, written in pieces: what goes where, headers first, then the bytes as they come.

Where they come from is the caller's: from the ranks of a run (export.py) or out of a checkpoint (export_checkpoint.py);
of a run with adapters export_adapter.py and export_merged.py say what is written.
Only tensors that have to be split or merged back into the form of the original files are put together in memory, a
layer at a time.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from coremill.checkpoint.generation_config import GENERATION_CONFIG, with_end_ids
from coremill.checkpoint.store import FirstFailure, SteadyFile
from coremill.data.tokenizer_files import files_of_tokenizer, write_chat_templates
from coremill.errors import StorageError
from coremill.files import sync_file, sync_folder
from coremill.model.build import build_on_meta, code_of, names_kept_in_fp32
from coremill.model.names import map_names
from coremill.model.slices import named_tensors
from coremill.model.source import ModelFolder
from coremill.plan.headers import INDEX_FILE, SINGLE_FILE, read_headers
from coremill.plan.memory import EXPORT_PIECE_BYTES

MAX_FILE_BYTES = 5 * 10**9
STORED_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """One tensor of the export, as its header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Parameters that have to be together to become tensors of the files."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # in which each of them is stored
    entries: tuple[Entry, ...]
    streamed: bool  # one parameter, at most renamed: its rows go straight to the file

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


@dataclass(frozen=True)
class Weights:
    """What is exported: tensors for their shapes and types, and the elements of each, piece by piece in order."""

    tensors: Mapping[str, torch.Tensor]
    pieces: Callable[[str], Iterator[torch.Tensor]]  # they may share a buffer; nothing where others write
    writes: bool = True  # whether this process writes the files


def make_blueprint(source: ModelFolder) -> PreTrainedModel:
    """The model without weights, which knows how its tensors are called in files."""
    blueprint = build_on_meta(source, attention="eager")
    if source.weights == "pretrained":
        blueprint._weight_conversions = list(map_names(blueprint, read_headers(source.folder)).used)
    return blueprint


class FolderWriter:
    """One export: `total_bytes` are known beforehand; the folder is there once it is whole.

    `write_beside` puts everything but the weights into a fresh folder; `blueprint` turns groups that are not streamed
    back into the form of the files.
    """

    def __init__(
        self,
        files: dict[str, list[Group]],
        weights: Weights,
        blueprint: PreTrainedModel,
        write_beside: Callable[[Path], None],
    ) -> None:
        self.files, self._weights, self._blueprint, self._write_beside = files, weights, blueprint, write_beside
        self.total_bytes = sum(group.bytes for groups in files.values() for group in groups)

    def write(
        self,
        destination: Path,
        on_bytes: Callable[[int], None],
        *,
        replaces: bool = True,
        card: str | None = None,
    ) -> None:
        """Every rank calls it; where files are written, raises StorageError. `card` is the README of the folder.

        What was there before goes where it `replaces` that; else it is in the way.
        """
        # A run that exports to its own folder, and somebody who exports it to that very place, do not share it.
        temporary = destination.with_name(f".{destination.name}.{'partial' if replaces else 'exporting'}")
        disk, weights = FirstFailure(), self._weights
        try:
            if weights.writes:
                disk.attempt(self._begin, temporary, card)
            for file, listed in self.files.items():
                _write_file(temporary / file, listed, weights, self._blueprint, on_bytes, disk)
            if weights.writes:
                disk.attempt(_publish if replaces else _put, temporary, destination)
        except BaseException:
            if weights.writes:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if (error := disk.error) is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StorageError(f"cannot write the export: {error.strerror or error}", where=str(destination)) from error

    def _begin(self, folder: Path, card: str | None) -> None:
        """A fresh folder with everything but the weights."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._write_beside(folder)
        if card is not None:
            _write_text(folder / "README.md", card)


def model_writer(
    source: ModelFolder,
    tokenizer_folder: Path | None,
    blueprint: PreTrainedModel,
    weights: Weights,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    end_ids: Sequence[int] = (),
) -> FolderWriter:
    """What writes a whole model, in the form of the files it came from; `dtypes` are those of single parameters.

    `end_ids` are the tokens that answers end with, where it learned conversations: generation ends there too."""
    groups = _plan_groups(blueprint, weights.tensors, dtype, dtypes or {})
    files = _plan_files(groups)

    def write_beside(folder: Path) -> None:
        write_json(folder / "config.json", changed_config(source, blueprint, dtype))
        if len(files) > 1:
            listed = [(entry, file) for file, part in files.items() for group in part for entry in group.entries]
            weight_map = {entry.name: file for entry, file in listed}
            total_bytes = sum(group.bytes for group in groups)
            write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
        if not write_end_ids(folder, source, blueprint, end_ids) and (source.folder / GENERATION_CONFIG).is_file():
            _copy(source.folder / GENERATION_CONFIG, folder)
        copy_code(folder, source)
        copy_tokenizer(folder, tokenizer_folder, source)

    return FolderWriter(files, weights, blueprint, write_beside)


def changed_config(source: ModelFolder, blueprint: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the model that a run made of its source."""
    config = {key: value for key, value in source.config.items() if key not in ("torch_dtype", "dtype")}
    config |= source.config_changes
    return {**config, "architectures": [type(blueprint).__name__], "dtype": str(dtype).removeprefix("torch.")}


def write_end_ids(folder: Path, source: ModelFolder, blueprint: PreTrainedModel, end_ids: Sequence[int]) -> bool:
    """A generation config with them, where the model's own lacks one; whether it was written."""
    document = with_end_ids(source.folder, blueprint, end_ids)
    if document is not None:
        write_json(folder / GENERATION_CONFIG, document)
    return document is not None


def copy_code(folder: Path, source: ModelFolder) -> None:
    """That came with the model, where it is run: its tokenizer may need it too."""
    if source.code_sha256 is not None:
        for path in sorted(code_of(source).glob("*.py")):
            _copy(path, folder)


def copy_tokenizer(folder: Path, tokenizer_folder: Path | None, source: ModelFolder) -> None:
    """With its chat template, or the model's where it has none."""
    if tokenizer_folder is None:
        return
    for path in files_of_tokenizer(tokenizer_folder):
        _copy(path, folder)
    write_chat_templates(folder, tokenizer_folder, source.folder if source.weights == "pretrained" else None)


def tensors_to_write(model: nn.Module, blueprint: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every tensor once, tied ones by the name transformers keeps."""
    tensors = named_tensors(model)
    tied = set(blueprint.all_tied_weights_keys or ())
    ignored = set(getattr(blueprint, "_keys_to_ignore_on_save", None) or ())
    by_tensor: dict[int, str] = {}
    for name in sorted((name for name in tensors if name not in ignored), key=lambda name: name in tied):
        by_tensor.setdefault(id(tensors[name]), name)
    kept = set(by_tensor.values())
    return {name: tensor for name, tensor in tensors.items() if name in kept}


def _plan_groups(
    blueprint: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    given: Mapping[str, torch.dtype],
) -> list[Group]:
    """What becomes what, found by a dry run on meta: a stand-in that comes back as itself was renamed at most."""
    in_fp32 = names_kept_in_fp32(blueprint, dtype)
    dtypes = {name: dtype if isinstance(tensor, nn.Parameter) else tensor.dtype for name, tensor in tensors.items()}
    dtypes |= dict.fromkeys(in_fp32 & dtypes.keys(), torch.float32)
    dtypes |= {name: each for name, each in given.items() if name in dtypes}
    stand_ins = {name: torch.empty(tensor.shape, dtype=dtypes[name], device="meta") for name, tensor in tensors.items()}
    outcome = revert_weight_conversion(blueprint, dict(stand_ins))
    stored_names = {id(tensor): name for name, tensor in outcome.items()}
    groups: list[Group] = []
    converted: dict[str, list[str]] = {}
    for name, stand_in in stand_ins.items():
        stored_name = stored_names.get(id(stand_in))
        if stored_name is not None:
            entry = Entry(stored_name, tuple(stand_in.shape), stand_in.dtype)
            groups.append(Group((name,), (stand_in.dtype,), (entry,), streamed=True))
        else:
            layer = re.match(r".*?\.\d+\.", name)
            converted.setdefault(layer.group(0) if layer else "", []).append(name)
    for names in converted.values():
        reverted = revert_weight_conversion(blueprint, {name: stand_ins[name] for name in names})
        entries = tuple(Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in reverted.items())
        groups.append(Group(tuple(names), tuple(dtypes[name] for name in names), entries, streamed=False))
    if {entry.name for group in groups for entry in group.entries} != set(outcome):
        raise NotImplementedError("this model's weights cannot be converted back layer by layer")
    return groups


def _plan_files(groups: list[Group]) -> dict[str, list[Group]]:
    """Files of at most 5 GB (a larger group has a file of its own), named as transformers names them."""
    parts: list[list[Group]] = [[]]
    used = 0
    for group in groups:
        if used and used + group.bytes > MAX_FILE_BYTES:
            parts.append([])
            used = 0
        parts[-1].append(group)
        used += group.bytes
    if len(parts) == 1:
        return {SINGLE_FILE: parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def _write_file(
    path: Path,
    groups: list[Group],
    weights: Weights,
    blueprint: PreTrainedModel,
    on_bytes: Callable[[int], None],
    disk: FirstFailure,
) -> None:
    """Stream one file; after a failed write what others send is still taken: no rank is left waiting."""
    file = SteadyFile(path)
    if weights.writes:
        disk.attempt(file.open)
        disk.attempt(lambda: file.write(memoryview(_header(groups))))
    for group in groups:
        for data in _stored_bytes(group, weights, blueprint):  # nothing on the other ranks
            disk.attempt(file.write, data)
            on_bytes(data.nbytes)
    if weights.writes:
        disk.attempt(file.sync)
    file.close()


def _header(groups: list[Group]) -> bytes:
    """Length and JSON header of a safetensors file, padded so that the data is aligned to 8 bytes."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in (entry for group in groups for entry in group.entries):
        document[entry.name] = {
            "dtype": STORED_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.bytes],
        }
        position += entry.bytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stored_bytes(group: Group, weights: Weights, blueprint: PreTrainedModel) -> Iterator[memoryview]:
    """The bytes of a group in the order of the header, where they are written; the other ranks only send."""
    tensors = weights.tensors
    if group.streamed:
        for piece in weights.pieces(group.names[0]):
            yield _as_bytes(piece.to(group.entries[0].dtype))
        return
    wholes: dict[str, torch.Tensor] = {}
    for name, dtype in zip(group.names, group.dtypes, strict=True):
        # The pieces share one buffer: each is copied to its place before the next arrives.
        whole = torch.empty(tensors[name].numel() if weights.writes else 0, dtype=dtype)
        position = 0
        for piece in weights.pieces(name):
            whole[position : position + piece.numel()].copy_(piece)
            position += piece.numel()
        wholes[name] = whole
    if weights.writes:
        wholes = {name: whole.view(tensors[name].shape) for name, whole in wholes.items()}
        reverted = revert_weight_conversion(blueprint, wholes)
        for entry in group.entries:
            yield _as_bytes(reverted[entry.name].contiguous())


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_json(path: Path, document: dict[str, Any]) -> None:
    _write_text(path, json.dumps(document, indent=2, sort_keys=True) + "\n")


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        sync_file(stream)


def _copy(path: Path, folder: Path) -> None:
    """Contents only: a file from a read-only cache must not leave a read-only export."""
    with (folder / path.name).open("wb") as stream:
        stream.write(path.read_bytes())
        sync_file(stream)


def _put(temporary: Path, destination: Path) -> None:
    """Put the finished folder where nothing but an empty one may be."""
    sync_folder(temporary)
    temporary.rename(destination)
    sync_folder(destination.parent)


def _publish(temporary: Path, destination: Path) -> None:
    """Put the finished folder in its place; an older export stays until then."""
    sync_folder(temporary)
    previous = destination.with_name(f".{destination.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    if destination.exists():
        destination.rename(previous)
    temporary.rename(destination)
    sync_folder(destination.parent)
    shutil.rmtree(previous, ignore_errors=True)


def pieces_of(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A flat tensor cut into pieces of a few megabytes."""
    return torch.split(flat, EXPORT_PIECE_BYTES // flat.element_size()) if flat.numel() else ()
