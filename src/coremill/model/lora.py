"""Adapters beside a model that stays as it is: peft puts them in, here is what is trained and what it starts from.

The base is frozen and kept apart (model/slices.py): engines hold it narrow and once, checkpoints do not hold it.
Modules that are trained whole (`lora.modules_to_save`) stay where they are: peft would keep a frozen copy of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coremill.config.schema import LoraSection
from coremill.model.initialise import InitialOperation, Record
from coremill.model.lora_base import Base
from coremill.model.parameter_list import named_parameters
from coremill.model.slices import RowSlice, keep_base_apart
from coremill.plan.adapter_folder import ADAPTER, ADAPTER_WEIGHTS, another_adapter, is_adapter, name_in_file
from coremill.plan.adapters import (
    Adapted,
    adapted_by,
    alpha_of,
    modules_of,
    names_for_peft,
    words_of_adapters,
)
from coremill.plan.headers import TensorHeader, read_file_header
from coremill.plan.types import Choice

if TYPE_CHECKING:
    from peft import LoraConfig


def add_adapters(model: nn.Module, lora: LoraSection, drawn: tuple[str, ...] = ()) -> dict[str, Choice[Any]]:
    """Put adapters into a model on meta, freeze the rest; how many numbers are trained, and where they are. What begins
    with `drawn` is new and trained whole, as the head."""
    from peft import inject_adapter_in_model

    parameters = named_parameters(model, drawn)
    adapted = adapted_by(parameters, lora)
    whole = [model.get_parameter(each.names[0]) for each in adapted.whole]
    inject_adapter_in_model(peft_config(adapted, modules_of(parameters), lora), model, ADAPTER, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for parameter in whole:
        parameter.requires_grad_(True)
    keep_base_apart(model)
    model.train()
    return {"adapters": Choice(adapted.trained_parameters, words_of_adapters(adapted, lora))}


def peft_config(adapted: Adapted, linear: list[str], lora: LoraSection, base: Base | None = None) -> LoraConfig:
    """The same in peft's words; with the `base` that the adapters belong to as an adapter folder says it."""
    from peft import LoraConfig

    alpha = alpha_of(lora)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=lora.dropout,
        target_modules=names_for_peft(adapted.names, linear),
        modules_to_save=None,
    )
    if base is not None:
        config.base_model_name_or_path, config.revision = base.name, base.revision
        config.inference_mode = True
        # Modules that hold parameters themselves, by all their names: a tied table has two.
        whole = {name.rpartition(".")[0] for parameter in adapted.whole for name in parameter.names}
        config.modules_to_save = sorted(whole) or None
        config.ensure_weight_tying = any(len(parameter.names) > 1 for parameter in adapted.whole)
    return config


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


def headers_of_adapter(
    folder: Path, slices: Mapping[tuple[str, ...], RowSlice], lora: LoraSection
) -> dict[str, TensorHeader]:
    """Where in an adapter folder each trained parameter lies, under any of its names; the launcher has looked at all of
    it before."""
    headers = read_file_header(folder / ADAPTER_WEIGHTS)
    found: dict[str, TensorHeader] = {}
    for names, piece in slices.items():
        header = next((headers[stored] for name in names if (stored := name_in_file(name)) in headers), None)
        if header is None or header.shape != piece.shape:
            raise another_adapter(folder, lora, piece.name, None if header is None else header.shape, piece.shape)
        found[piece.name] = header
    return found


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
