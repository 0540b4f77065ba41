"""Adapters beside a model that stays as it is: peft puts them in, here is what is trained and what it starts from.

The base is frozen and kept apart (model/slices.py): engines hold it narrow and once, checkpoints do not hold it.
Modules that are trained whole (`lora.modules_to_save`) stay where they are: peft would keep a frozen copy of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coremill.config.schema import LoraSection
from coremill.errors import InputError
from coremill.model.initialise import InitialOperation, Record
from coremill.model.parameter_list import named_parameters
from coremill.model.slices import RowSlice, keep_base_apart
from coremill.plan.adapters import (
    Adapted,
    adapted_by,
    alpha_of,
    linear_maps,
    names_for_peft,
    words_of_adapters,
)
from coremill.plan.headers import TensorHeader, read_file_header
from coremill.plan.types import Choice

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"  # peft's name for the one that there is
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."  # of every name in an adapter's file


def add_adapters(model: nn.Module, lora: LoraSection) -> dict[str, Choice[Any]]:
    """Put adapters into a model on meta, freeze the rest; how many numbers are trained, and where they are."""
    from peft import inject_adapter_in_model

    parameters = named_parameters(model)
    adapted = adapted_by(parameters, lora)
    whole = [model.get_parameter(each.names[0]) for each in adapted.whole]
    inject_adapter_in_model(peft_config(adapted, linear_maps(parameters), lora), model, ADAPTER, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for parameter in whole:
        parameter.requires_grad_(True)
    keep_base_apart(model)
    model.train()
    return {"adapters": Choice(adapted.trained_parameters, words_of_adapters(adapted, lora))}


def peft_config(adapted: Adapted, linear: list[str], lora: LoraSection, base: str | None = None) -> LoraConfig:
    """The same in peft's words; `base` is where it finds the model that the adapters belong to."""
    from peft import LoraConfig

    alpha = alpha_of(lora)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=lora.dropout,
        target_modules=names_for_peft(adapted.names, linear),
        modules_to_save=None,
        base_model_name_or_path=base,
        inference_mode=base is not None,
    )


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def name_in_file(name: str) -> str:
    """Of a trained parameter in an adapter's file, by its name in the module."""
    return FILE_PREFIX + name.replace(f".{ADAPTER}.", ".") if is_adapter(name) else FILE_PREFIX + name


# -- what adapters start from


def fresh_adapters(slices: Iterable[RowSlice]) -> Record:
    """As peft begins: A uniform by its fan-in, B zero, so that the first step finds the model as it was."""
    record: Record = {}
    for piece in slices:
        if ".lora_B." in piece.name:
            function, arguments = "constant_", {"val": 0.0}
        else:
            bound = 1.0 / math.sqrt(piece.shape[1])  # kaiming_uniform with a = sqrt(5)
            function, arguments = "uniform_", {"a": -bound, "b": bound}
        stride = (piece.shape[1], 1)
        record[piece.name] = [InitialOperation(function, arguments, 0, piece.shape, stride, (0, piece.shape[0]))]
    return record


def headers_of_adapter(folder: Path, slices: Iterable[RowSlice], lora: LoraSection) -> dict[str, TensorHeader]:
    """Where in an adapter folder each trained parameter lies; refused where it is of another model or shape."""
    headers = read_file_header(folder / ADAPTER_WEIGHTS)
    found: dict[str, TensorHeader] = {}
    for piece in slices:
        header = headers.get(name_in_file(piece.name))
        if header is None or header.shape != piece.shape:
            held = "is not in it" if header is None else f"has shape {list(header.shape)} in it"
            raise InputError(
                f"the adapter in {folder} is of another model or form: {piece.name} {held}, the model wants"
                f" {list(piece.shape)}",
                where="lora.start_from",
                why=_difference(folder, lora),
                do="name the adapter's own base in model, and its rank and target_modules in lora",
            )
        found[piece.name] = header
    if unused := sorted(set(headers) - {name_in_file(name) for name in found}):
        raise InputError(
            f"the adapter in {folder} has {len(unused)} tensors that this run does not train: {unused[0]}",
            where="lora.start_from",
            why=_difference(folder, lora),
            do="name the adapter's own target_modules and modules_to_save in lora",
        )
    return found


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA folder as it is; refused where there is none or it is of another method."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise InputError(
            f"no {ADAPTER_CONFIG} in {folder}",
            where="lora.start_from",
            why="that is where peft says what an adapter is",
            do="name an adapter folder, such as RUN/export of a run with adapters",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{ADAPTER_CONFIG} cannot be read: {error}", where=str(file)) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise InputError(
            f"{folder} holds no LoRA adapter but {kind}",
            where="lora.start_from",
            why="other methods train other things",
            do="name a LoRA folder, or leave lora.start_from out",
        )
    return config


def refuse_other_adapter(folder: Path, lora: LoraSection) -> None:
    """Before anything starts: an adapter that cannot be the beginning of this run."""
    config = read_adapter_config(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise InputError(
            f"no {ADAPTER_WEIGHTS} in {folder}",
            where="lora.start_from",
            why="its weights are pickled, which could run anything when loaded" if pickled else "it has no weights",
            do="save it again with peft (safe_serialization=True)",
        )
    if any(config.get(key) for key in ("use_dora", "rank_pattern", "alpha_pattern", "use_rslora")):
        names = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "use_rslora") if config.get(key)]
        raise InputError(
            f"the adapter in {folder} uses {' and '.join(names)}",
            where="lora.start_from",
            why="here every adapter has the same rank and scale",
            do="start a new adapter: leave lora.start_from out",
        )
    wanted: Mapping[str, Any] = {"r": lora.rank, "lora_alpha": alpha_of(lora)}
    for key, value in wanted.items():
        if config.get(key) != value:
            ours = {"r": "lora.rank", "lora_alpha": "lora.alpha"}[key]
            raise InputError(
                f"the adapter in {folder} has {key} {config.get(key)}, the run file {ours} {value:g}",
                where="lora.start_from",
                why="an adapter goes on with the rank and the scale that it was trained with",
                do=f"set {ours}: {config.get(key)}",
            )


def _difference(folder: Path, lora: LoraSection) -> str:
    config = read_adapter_config(folder)
    base, targets = config.get("base_model_name_or_path"), config.get("target_modules")
    return f"it was made for {base}, with target_modules {targets}; here lora.target_modules is {lora.target_modules}"


# -- a quicker form


class _LoraLinear(torch.autograd.Function):
    """x W' + b + scale x A' B', the base frozen: one pass over the output, no gradient of the base."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = nn.functional.linear(rows, weight, bias)
        narrow = rows @ a.t()
        out.addmm_(narrow, b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, a, b, narrow)
        ctx.scale = scale
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, a, b, narrow = ctx.saved_tensors
        rows, above = x.reshape(-1, x.shape[-1]), upstream.reshape(-1, upstream.shape[-1])
        narrow_above = (above @ b).mul_(ctx.scale)
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = above @ weight
            gradient.addmm_(narrow_above, a)
            gradient = gradient.view(x.shape)
        b_gradient = (above.t() @ narrow).mul_(ctx.scale)
        return gradient, None, None, narrow_above.t() @ rows, b_gradient, None


def fuse_adapters(model: nn.Module) -> int:
    """Give adapted linear maps a forward that computes the same in fewer passes; how many there are."""
    from peft.tuners.lora import Linear

    count = 0
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.forward = _forward_of(module)
            count += 1
    return count


def _forward_of(module: Any) -> Any:
    own, scale, dropout = module.forward, module.scaling[ADAPTER], module.lora_dropout[ADAPTER]

    def forward(x: torch.Tensor) -> torch.Tensor:
        base, a, b = module.base_layer, module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
        if not isinstance(dropout, nn.Identity) or x.dtype != base.weight.dtype or a.dtype != x.dtype:
            result: torch.Tensor = own(x)
            return result
        fused: torch.Tensor = _LoraLinear.apply(x, base.weight, base.bias, a, b, scale)  # type: ignore[no-untyped-call]
        return fused

    return forward
