"""Fills a placed module: each rank reads the byte ranges of its own rows, or draws them, and never holds more.

What it costs: this rank's rows of every tensor that only needs a new name, once. Tensors that transformers' converters
merge, split or transpose (a mixture's experts) are read whole by every rank, one conversion at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from coremill.config.schema import LoraSection
from coremill.errors import InputError
from coremill.model.build import build_on_meta
from coremill.model.initialise import initialise, record_initialisation
from coremill.model.lora import fresh_adapters, headers_of_adapter
from coremill.model.names import Conversion, NameMap, map_names
from coremill.model.poolers import whole_poolers
from coremill.model.read import FLOATING, TensorReader, bytes_of_rows, quantised
from coremill.model.slices import RowSlice, has_base_apart, model_name, named_tensors, slice_of
from coremill.model.source import ModelFolder
from coremill.plan.adapter_folder import is_adapter
from coremill.plan.headers import TensorHeader, read_headers
from coremill.world.heartbeat import HEARTBEAT


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What loading took on this rank."""

    bytes_read: int  # of tensors; headers come on top
    tensor_bytes: int  # of the tensors the model takes from the files, over all ranks
    seconds: float
    largest_slice_bytes: int  # the largest piece of one parameter this rank holds, in fp32
    initialised: tuple[str, ...]  # parameters that were in no file and got random values
    unexpected: tuple[str, ...]  # tensors in the files that the model has no place for
    converted: tuple[str, ...]  # parameters that were more than renamed, and so were read whole
    new_head: bool = False  # all that was drawn is the head of the task, whose model came without one


def together(reports: Sequence[LoadReport]) -> LoadReport:
    """Of a base that was read from the model's files, and what is trained beside it from a checkpoint."""
    first = reports[0]
    return replace(
        first,
        bytes_read=sum(each.bytes_read for each in reports),
        tensor_bytes=sum(each.tensor_bytes for each in reports),
        seconds=sum(each.seconds for each in reports),
        largest_slice_bytes=max(each.largest_slice_bytes for each in reports),
    )


@torch.no_grad()
def fill_parameters(
    model: nn.Module,
    source: ModelFolder,
    *,
    rank: int,
    world_size: int,
    seed: int,
    lora: LoraSection | None = None,
) -> LoadReport:
    """Write this rank's rows of every parameter: from the folder's files, or drawn as the model itself would.

    Adapters, which no model's files have, begin anew or where `lora.start_from` left them."""
    started = time.perf_counter()
    tensors = named_tensors(model)
    aliases = aliases_of(tensors)
    slices = {names[0]: slice_of(names[0], tensors[names[0]], rank, world_size) for names in aliases}
    # Engines wrap modules and change their classes; names and initialisation are looked up on an untouched twin.
    blueprint = build_on_meta(source, attention="eager")
    parameters = {model_name(name) for name, _ in model.named_parameters()}
    headers = read_headers(source.folder) if source.weights == "pretrained" else {}
    names = map_names(blueprint, headers) if headers else NameMap({}, {}, (), ())
    if "id2label" in source.config_changes:
        names = _without_other_heads(names, headers, slices, aliases, blueprint)
    to_read = _bytes_to_read(slices, aliases, names, headers)
    with HEARTBEAT.work("reading weights", to_read), TensorReader(source.folder) as reader:
        filled = _read_renamed(reader, slices, aliases, names.renamed, headers)
        filled |= _read_converted(reader, slices, aliases, names.conversions, headers, blueprint)
        bytes_read = reader.bytes_read
    missing = [name for name in slices if name not in filled and name in parameters and not is_adapter(name)]
    if source.weights == "pretrained":
        _check_missing(missing, aliases, blueprint, source)
    if missing:
        record = record_initialisation(blueprint, seed)
        with HEARTBEAT.work("making weights", sum(slices[name].bytes for name in missing)):
            for name in missing:
                initialise(slices[name], record, seed)
                HEARTBEAT.advance(slices[name].bytes)
    if has_base_apart(model):
        assert lora is not None
        trained = {model_name(name) for name, each in model.named_parameters() if each.requires_grad}
        pieces = {names: slices[names[0]] for names in aliases if not trained.isdisjoint(names)}
        bytes_read += _fill_adapters(pieces, lora, seed)
    taken = {*names.renamed.values(), *(name for each in names.conversions.values() for name, _ in each.sources)}
    return LoadReport(
        bytes_read=bytes_read,
        tensor_bytes=sum(headers[name].bytes for name in taken),
        seconds=time.perf_counter() - started,
        largest_slice_bytes=max((piece.bytes for piece in slices.values()), default=0),
        initialised=tuple(missing) if source.weights == "pretrained" else (),
        unexpected=names.unexpected,
        converted=tuple(sorted(names.conversions)),
        new_head=source.weights == "pretrained" and _is_new_head(missing, blueprint),
    )


def _is_new_head(missing: Sequence[str], blueprint: PreTrainedModel) -> bool:
    """Whether something is missing, of a model that predicts no words: `_check_missing` let pass a head at most."""
    return bool(missing) and blueprint.get_output_embeddings() is None


def _fill_adapters(slices: Mapping[tuple[str, ...], RowSlice], lora: LoraSection, seed: int) -> int:
    """What is trained beside a base, by all its names; how many bytes were read of it."""
    if lora.start_from is None:
        adapters = [piece for piece in slices.values() if is_adapter(piece.name)]
        record = fresh_adapters(adapters)
        for piece in adapters:
            initialise(piece, record, seed)
        return 0
    folder = Path(lora.start_from)
    headers = headers_of_adapter(folder, slices, lora)
    with TensorReader(folder) as reader:
        for piece in slices.values():
            reader.read_rows(headers[piece.name], piece.start, piece.stop, piece.local)
        return reader.bytes_read


def aliases_of(tensors: dict[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """The names of each tensor, tied ones together, in the order of the module."""
    grouped: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        grouped.setdefault(id(tensor), []).append(name)
    return [tuple(names) for names in grouped.values()]


def _bytes_to_read(
    slices: dict[str, RowSlice], aliases: Iterable[tuple[str, ...]], names: NameMap, headers: dict[str, TensorHeader]
) -> int:
    """What this rank reads: its rows of what is only renamed, all of what is converted."""
    rows = sum(
        bytes_of_rows(headers[names.renamed[name]], slices[tied[0]].start, slices[tied[0]].stop)
        for tied in aliases
        for name in tied
        if name in names.renamed
    )
    return rows + sum(headers[name].bytes for each in names.conversions.values() for name, _ in each.sources)


def _read_renamed(
    reader: TensorReader,
    slices: dict[str, RowSlice],
    aliases: Iterable[tuple[str, ...]],
    renamed: dict[str, str],
    headers: dict[str, TensorHeader],
) -> set[str]:
    """Read by byte range what only has another name in its file; returns the names that are filled."""
    jobs: list[tuple[TensorHeader, RowSlice]] = []
    twins: list[tuple[TensorHeader, RowSlice]] = []
    for names in aliases:
        piece = slices[names[0]]
        stored = [headers[renamed[name]] for name in names if name in renamed]
        for header in stored:
            _check_shape(header, piece)
        jobs += [(header, piece) for header in stored[:1]]
        twins += [(header, piece) for header in stored[1:]]
    # In the order of the files: a spinning disk or a network file system reads ahead.
    for header, piece in sorted(jobs, key=lambda job: (job[0].file, job[0].start)):
        reader.read_rows(header, piece.start, piece.stop, piece.local)
    for header, piece in twins:
        if not reader.rows_equal(header, piece.start, piece.stop, piece.local):
            raise InputError(
                f"{header.name} is tied to {piece.name} by the config, but the files hold different values for the two",
                where=header.file,
                do='set "tie_word_embeddings": false in config.json, or remove one of the two tensors',
            )
    return {piece.name for _, piece in jobs}


def _read_converted(
    reader: TensorReader,
    slices: dict[str, RowSlice],
    aliases: Iterable[tuple[str, ...]],
    conversions: dict[str, Conversion],
    headers: dict[str, TensorHeader],
    blueprint: PreTrainedModel,
) -> set[str]:
    """Put tensors through transformers' converters, one conversion at a time, and keep this rank's rows."""
    first_name = {name: names[0] for names in aliases for name in names}
    filled: set[str] = set()
    for target, conversion in conversions.items():
        for name, whole in converted_tensors(reader, target, conversion, headers, blueprint).items():
            piece = slices.get(first_name.get(name, name))
            if piece is None:
                continue
            if tuple(whole.shape) != piece.shape:
                raise _wrong_shape(name, tuple(whole.shape), piece.shape, headers[conversion.sources[0][0]].file)
            piece.local.copy_(whole[piece.start : piece.stop] if piece.shape else whole)
            filled.add(piece.name)
    return filled


def converted_tensors(
    reader: TensorReader,
    target: str,
    conversion: Conversion,
    headers: Mapping[str, TensorHeader],
    blueprint: PreTrainedModel,
) -> dict[str, torch.Tensor]:
    """What one conversion makes of its tensors in the files, by name in the module."""
    converter = conversion.converter
    for name, pattern in conversion.sources:
        converter.add_tensor(target, name, pattern, partial(reader.read_whole, headers[name]))
    made = converter.convert(target, model=blueprint, config=blueprint.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _without_other_heads(
    names: NameMap,
    headers: Mapping[str, TensorHeader],
    slices: Mapping[str, RowSlice],
    aliases: Iterable[tuple[str, ...]],
    blueprint: PreTrainedModel,
) -> NameMap:
    """Less what the files have of a head for another number of classes, where the run names its own: a new one is
    drawn."""
    prefix = f"{blueprint.base_model_prefix}."
    first = {name: tied[0] for tied in aliases for name in tied}
    other = {
        name
        for name, stored in names.renamed.items()
        if not name.startswith(prefix) and headers[stored].shape != slices[first[name]].shape
    }
    return replace(names, renamed={name: stored for name, stored in names.renamed.items() if name not in other})


def _check_shape(header: TensorHeader, piece: RowSlice) -> None:
    if header.shape != piece.shape:
        raise _wrong_shape(header.name, header.shape, piece.shape, header.file)
    if header.dtype not in FLOATING and piece.local.is_floating_point():
        raise quantised(header)


def _wrong_shape(name: str, stored: tuple[int, ...], wanted: tuple[int, ...], file: str) -> InputError:
    return InputError(
        f"tensor {name} has shape {list(stored)} in the file, the model wants {list(wanted)}",
        where=file,
        why="config.json does not belong to these weights",
        do="use the config.json that came with them",
    )


def _check_missing(
    missing: list[str], aliases: Iterable[tuple[str, ...]], blueprint: PreTrainedModel, source: ModelFolder
) -> None:
    """The base model must be whole. A head on top of it may be new: a base model's checkpoint has none."""
    prefix = f"{blueprint.base_model_prefix}."
    names_of = {names[0]: names for names in aliases}
    in_trunk = [name for name in missing if any(alias.startswith(prefix) for alias in names_of[name])]
    poolers = whole_poolers(in_trunk, blueprint)
    holes = [name for name in in_trunk if not name.startswith(poolers)]
    if holes:
        shown = ", ".join(holes[:3]) + (f" and {len(holes) - 3} more" if len(holes) > 3 else "")
        raise InputError(
            f"the weights lack {len(holes)} parameters of the model: {shown}",
            where=str(source.folder),
            why="config.json does not belong to these weights, or a part of them is missing",
            do="download or copy the folder again, or set model.weights=random to start from scratch",
        )
