"""What a run with adapters leaves: the folder that peft loads, or the model with the adapters added in.

A merged model is made of the base's own files, read a few megabytes at a time: each row gets what its adapter adds, in
fp32, and is rounded once. Nobody ever holds the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from coremill.checkpoint.export_folder import (
    Entry,
    FolderWriter,
    Group,
    Weights,
    changed_config,
    copy_code,
    copy_tokenizer,
    model_writer,
    tensors_to_write,
    write_end_ids,
    write_json,
)
from coremill.config.schema import LoraSection, RunConfig
from coremill.model.base_rows import BaseRows
from coremill.model.load import aliases_of
from coremill.model.lora import peft_config
from coremill.model.lora_base import Base, refuse_changed_base
from coremill.model.parameter_list import named_parameters
from coremill.model.poolers import drawn_poolers
from coremill.model.slices import named_tensors
from coremill.model.source import ModelFolder
from coremill.plan.adapter_folder import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_CONFIG, name_in_file
from coremill.plan.adapters import Adapted, adapted_by, alpha_of, modules_of
from coremill.plan.types import Choice

Form = Literal["model", "adapter", "merged"]
# What peft calls what a model is for, by the class of transformers that loads it.
TASK_TYPES = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
    "AutoModelForSequenceClassification": "SEQ_CLS",
}


@dataclass(frozen=True)
class AdapterExport:
    """What is asked for of a run with adapters."""

    lora: LoraSection
    base: Base
    seed: int  # of the run: what is in no file of the base was drawn from it
    merged: bool


def asked_of(config: RunConfig, base: Base | None, *, merged: bool | None = None) -> AdapterExport | None:
    """What the run file asks for, unless the command line says otherwise; None where there are no adapters."""
    if base is None:
        return None
    return AdapterExport(config.lora, base, config.train.seed, config.lora.merge if merged is None else merged)


def adapter_export_writer(
    wanted: AdapterExport,
    source: ModelFolder,
    tokenizer_folder: Path | None,
    trained: Weights,
    dtype: torch.dtype | None,
    *,
    end_ids: Sequence[int] = (),
) -> tuple[FolderWriter, Choice[Form]]:
    """What writes it, and in which form; `trained` are the parameters that were, by their names in the module.

    Without a `dtype` an adapter is as it was trained, fp32, and a merged model as the files of its base. `end_ids`
    are the tokens that answers end with.
    """
    base = BaseRows(source, seed=wanted.seed)
    parameters = named_parameters(base.blueprint, drawn_poolers(base.blueprint, source))
    adapted = adapted_by(parameters, wanted.lora)
    whole = {name for parameter in adapted.whole for name in parameter.names}
    form = _form_of(wanted, source, sorted(base.drawn - whole))
    if form.value == "merged":
        refuse_changed_base(wanted.base, source)
        return _merged_writer(wanted, base, adapted, source, tokenizer_folder, trained, dtype, end_ids), form
    config = peft_config(adapted, modules_of(parameters), wanted.lora, wanted.base)
    config.task_type = TASK_TYPES.get(source.model_class)
    config.fan_in_fan_out = all(isinstance(base.blueprint.get_submodule(name), Conv1D) for name in adapted.names)

    def write_beside(folder: Path) -> None:
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
        write_json(folder / ADAPTER_CONFIG, plain)
        if source.config_changes:  # a head of its own: how many classes, and their names, the base does not know
            (folder / BASE_CONFIG).mkdir()
            write_json(folder / BASE_CONFIG / "config.json", changed_config(source, base.blueprint, base.main_dtype))
        write_end_ids(folder, source, base.blueprint, end_ids)
        copy_code(folder, source)
        copy_tokenizer(folder, tokenizer_folder, source)

    groups = _adapter_groups(adapted, trained, dtype or torch.float32)
    return FolderWriter({ADAPTER_WEIGHTS: groups}, trained, base.blueprint, write_beside), form


def _form_of(wanted: AdapterExport, source: ModelFolder, drawn: list[str]) -> Choice[Form]:
    if wanted.merged:
        return Choice("merged", "lora.merge is true" if wanted.lora.merge else "it was asked for")
    if source.weights == "random":
        return Choice("merged", "the base was drawn at random: there are no files that an adapter could be loaded with")
    if drawn:
        return Choice("merged", f"{drawn[0]} is in no file of the base, so that an adapter alone would miss it")
    return Choice("adapter", "it was asked for" if wanted.lora.merge else "lora.merge is false")


def _adapter_groups(adapted: Adapted, trained: Weights, dtype: torch.dtype) -> list[Group]:
    """Each trained parameter by its name for peft; a table with two names twice, for there these are two modules."""
    names_of = {name: parameter.names for parameter in adapted.whole for name in parameter.names}
    groups = []
    for name, tensor in sorted(trained.tensors.items()):  # the same bytes from ranks and from a checkpoint
        if not isinstance(tensor, nn.Parameter):
            continue  # a buffer: as the base has it
        for stored in (name_in_file(each) for each in names_of.get(name, (name,))):
            entry = Entry(stored, tuple(tensor.shape), dtype)
            groups.append(Group((name,), (dtype,), (entry,), streamed=True))
    return groups


def _merged_writer(
    wanted: AdapterExport,
    base: BaseRows,
    adapted: Adapted,
    source: ModelFolder,
    tokenizer_folder: Path | None,
    trained: Weights,
    dtype: torch.dtype | None,
    end_ids: Sequence[int],
) -> FolderWriter:
    tensors = tensors_to_write(base.blueprint, base.blueprint)
    tied = {name: names for names in aliases_of(named_tensors(base.blueprint)) for name in names}
    scale = alpha_of(wanted.lora) / (wanted.lora.rank or 1)
    adapter_of = {f"{target}.weight": target for target in adapted.names}

    def pieces(name: str) -> Iterator[torch.Tensor]:
        """Every rank sends what it holds of the adapter; rows are made where they are written."""
        if held := [each for each in tied[name] if each in trained.tensors]:
            yield from trained.pieces(held[0])
            return
        target = next((adapter_of[each] for each in tied[name] if each in adapter_of), None)
        a, b = (None, None) if target is None else (_whole(trained, target, each) for each in "AB")
        if not trained.writes:
            return
        turned = target is not None and isinstance(base.blueprint.get_submodule(target), Conv1D)
        for start, stop, rows in base.pieces(name, tuple(tensors[name].shape)):
            if a is not None and b is not None and turned:  # GPT-2's weight is (inputs, outputs)
                rows.addmm_(a[:, start:stop].t(), b.t(), alpha=scale)
            elif a is not None and b is not None:
                rows.addmm_(b[start:stop], a, alpha=scale)
            yield rows.reshape(-1)

    weights = Weights(tensors, pieces, writes=trained.writes)
    to_write = (source, tokenizer_folder, base.blueprint, weights)
    if dtype is not None:
        return model_writer(*to_write, dtype, end_ids=end_ids)
    return model_writer(*to_write, base.main_dtype, base.dtypes, end_ids=end_ids)


def _whole(trained: Weights, target: str, which: str) -> torch.Tensor | None:
    """One of the two matrices of an adapter, where files are written; the other ranks only send."""
    name = f"{target}.lora_{which}.{ADAPTER}.weight"
    shape = tuple(trained.tensors[name].shape)
    whole = torch.empty(math.prod(shape) if trained.writes else 0)
    position = 0
    for piece in trained.pieces(name):
        whole[position : position + piece.numel()].copy_(piece)
        position += piece.numel()
    return whole.view(shape) if trained.writes else None


def parameters_by_shape(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Stand-ins for parameters of which shapes are known."""
    return {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
