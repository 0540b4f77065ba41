"""AdamW over what an engine trains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from coremill.engines.base import require_state_names
from coremill.engines.optimizers import OptimizerSettings
from coremill.engines.optimizers.moments_8bit import ADAMW_NAMES as STATE_NAMES
from coremill.engines.optimizers.moments_8bit import with_fp32_moments
from coremill.model.slices import RowSlice, model_name
from coremill.plan.trained import is_named

# By these names transformers' Trainer knows biases and norms.
UNDECAYED_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
PRODUCTS_AND_TABLES = (nn.Linear, nn.Embedding, nn.Conv1d)


class AdamW(torch.optim.AdamW):
    """Fused: one vectorised pass over weights, gradients and moments where the plain one makes about ten."""

    def __init__(
        self,
        model: nn.Module,
        trainable: Sequence[tuple[str, torch.Tensor]],
        settings: OptimizerSettings,
        slices: Sequence[RowSlice] = (),
    ) -> None:
        """`slices`: what an element becomes does not depend on where it lies."""
        left_out = undecayed(model, settings.no_decay)
        decayed = [tensor for name, tensor in trainable if name not in left_out]
        others = [tensor for name, tensor in trainable if name in left_out]
        super().__init__(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            eps=settings.adam_epsilon,
            fused=True,
        )
        self._group_of = {weight: group for group in self.param_groups for weight in group["params"]}

    def begin_step(self) -> None:
        """Each weight counts its own."""

    def update(self, learning_rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = learning_rate
        self.step()

    def move(self, weight: torch.Tensor, gradient: torch.Tensor, learning_rate: float, factor: float = 1.0) -> None:
        """As if it were the only one there is."""
        groups, group = self.param_groups, self._group_of[weight]
        weight.grad = gradient if factor == 1.0 else gradient.mul_(factor)
        self.param_groups = [{**group, "params": [weight], "lr": learning_rate}]
        try:
            self.step()
        finally:
            self.param_groups, weight.grad = groups, None

    def state_of(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        """The bias correction depends on the number of updates, which is each weight's own."""
        state = self.state.get(weight)
        return ({name: state[name] for name in STATE_NAMES}, int(state["step"])) if state else ({}, 0)

    def restore(self, weight: torch.Tensor, state: Mapping[str, torch.Tensor], updates: int) -> None:
        """A weight that was never moved has no state; what adamw-8bit held is converted."""
        if state:
            state = with_fp32_moments(state, weight.shape)
            require_state_names(state, STATE_NAMES)
            step = torch.tensor(float(updates), dtype=torch.float32)
            self.state[weight] = {"step": step, **{name: state[name] for name in STATE_NAMES}}


def undecayed(model: nn.Module, patterns: Sequence[str] = ()) -> set[str]:
    """Names of parameters that weight decay leaves out: biases and norms of any dimension, every other vector, and what
    the patterns name, of a tied weight by any of its names.

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
    named = model.named_parameters(remove_duplicate=False)
    left_out |= {parameter for name, parameter in named if is_named([model_name(name)], patterns)}
    return {name for name, parameter in model.named_parameters() if parameter in left_out}
