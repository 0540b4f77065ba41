"""AdamW over what the engine hands out."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from coremill.config.schema import TrainSection

# By these names transformers' Trainer knows biases and norms.
UNDECAYED_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
PRODUCTS_AND_TABLES = (nn.Linear, nn.Embedding, nn.Conv1d)


def make_optimizer(
    model: nn.Module, parameters: Sequence[tuple[str, torch.Tensor]], settings: TrainSection
) -> torch.optim.AdamW:
    """Fused AdamW: one vectorised pass over weights, gradients and moments where the plain one makes about ten.

    `parameters`: what is trained, by the names that the model has for it.
    """
    left_out = undecayed(model)
    groups = [
        {
            "params": [tensor for name, tensor in parameters if name not in left_out],
            "weight_decay": settings.weight_decay,
        },
        {"params": [tensor for name, tensor in parameters if name in left_out], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )


def undecayed(model: nn.Module) -> set[str]:
    """Names of parameters that weight decay leaves out: biases and norms of any dimension, and every other vector.

    Vectors that are neither (a state-space model's D, attention sinks) scale something, as norms do: transformers'
    Trainer decays them, we do not."""
    left_out: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower() and not isinstance(module, PRODUCTS_AND_TABLES)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if is_norm or parameter.dim() < 2 or UNDECAYED_NAMES.search(f"{prefix}.{name}".lower()):
                left_out.add(parameter)
    return {name for name, parameter in model.named_parameters() if parameter in left_out}
