"""What moves the weights, chosen by `train.optimizer`: an engine makes one over what it trains. No torch until then."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from coremill.config.schema import TrainSection

OPTIMIZERS = {"adamw": "coremill.engines.optimizers.adamw:AdamW"}


class Optimizer(Protocol):
    """Made with a model, the names and fp32 tensors of it that are trained, and the run file's settings."""

    def update(self, learning_rate: float) -> None:
        """Move every weight that has a gradient."""

    def state_of(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        """What it holds beside a weight, in the weight's shape, by the names a checkpoint has for it, and how often it
        has moved the weight; nothing and 0 for one that it never did."""

    def restore(self, weight: torch.Tensor, state: Mapping[str, torch.Tensor], updates: int) -> None:
        """The inverse, before the first update."""


def make_optimizer(
    model: nn.Module, trainable: Sequence[tuple[str, torch.Tensor]], settings: TrainSection
) -> Optimizer:
    """`trainable`: by the names that the model has for it."""
    module, _, name = OPTIMIZERS[settings.optimizer].partition(":")
    made: Optimizer = getattr(importlib.import_module(module), name)(model, trainable, settings)
    return made
