"""What moves the weights, chosen by `train.optimizer`: an engine makes one over what it trains. No torch until then."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from coremill.engines.optimizers.cost import COSTS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from coremill.config.schema import TrainSection
    from coremill.model.slices import RowSlice
    from coremill.plan.types import Plan

OPTIMIZERS = {
    "adamw": "coremill.engines.optimizers.adamw:AdamW",
    "adamw-8bit": "coremill.engines.optimizers.adamw_8bit:AdamW8bit",
}


class Optimizer(Protocol):
    """Made with a model, the names and tensors of it that are trained, the settings, and where the rows of each lie."""

    def begin_step(self) -> None:
        """Before the first weight of a step is moved."""

    def update(self, learning_rate: float) -> None:
        """A whole step: move every weight that has a gradient."""

    def move(self, weight: torch.Tensor, gradient: torch.Tensor, learning_rate: float, factor: float = 1.0) -> None:
        """One of them, by its gradient times `factor`; the gradient may be used up."""

    def state_of(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        """What it holds beside a weight, in the weight's shape, by the names a checkpoint has for it, and how often it
        has moved the weight; nothing and 0 for one that it never did."""

    def restore(self, weight: torch.Tensor, state: Mapping[str, torch.Tensor], updates: int) -> None:
        """The inverse, before the first update."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Which optimizer, and what it takes of the run file: all that an engine knows of either."""

    name: str
    update: Literal["after", "inside"]  # of backward
    seed: int  # of rounding, where it is random
    learning_rate: float  # the highest; each update brings its own
    weight_decay: float
    adam_betas: tuple[float, float]
    adam_epsilon: float
    no_decay: tuple[str, ...] = ()  # patterns over parameter names, beside what is left out by kind

    @property
    def state_bytes(self) -> float:
        """Held beside each parameter."""
        return COSTS[self.name].state_bytes

    @property
    def has_masters(self) -> bool:
        """Whether what it moves is fp32 where arithmetic is bf16."""
        return COSTS[self.name].has_masters

    def make(
        self, model: nn.Module, trainable: Sequence[tuple[str, torch.Tensor]], slices: Sequence[RowSlice]
    ) -> Optimizer:
        """`trainable`: by the names that the model has for it; `slices`: which rows of the whole they are."""
        module, _, name = OPTIMIZERS[self.name].partition(":")
        made: Optimizer = getattr(importlib.import_module(module), name)(model, trainable, self, slices)
        return made


def optimizer_of(train: TrainSection, plan: Plan | None = None) -> OptimizerSettings:
    """The one that the run file asks for; what it leaves open, the plan has decided."""
    return OptimizerSettings(
        name=plan.optimizer.value if plan else "adamw" if train.optimizer == "auto" else train.optimizer,
        update=plan.update.value if plan else "after" if train.update == "auto" else train.update,
        seed=train.seed,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        adam_betas=(train.adam_beta1, train.adam_beta2),
        adam_epsilon=train.adam_epsilon,
        no_decay=tuple(train.no_decay),
    )
