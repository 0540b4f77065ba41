"""The made-up engine: a model in one process, moved by SGD with momentum. It inherits nothing from coremill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from coremill.engines.base import LossFunction, ParameterState, StepTotals, WireUse, require_state_names
from coremill.model.slices import RowSlice, materialise
from coremill.plan.types import Choice

MOMENTUM = 0.9
VELOCITY = "velocity"  # its name in a checkpoint


class SgdEngine:
    """One process: nothing is exchanged."""

    name = "sgd-guest"
    exchange: Choice[Literal["memory", "wire"]] = Choice("memory", "sgd-guest: one process has nobody to talk to")

    def __init__(self) -> None:
        self._velocity: dict[torch.Tensor, torch.Tensor] = {}
        self._updates: dict[torch.Tensor, int] = {}
        self._gradient_norm = 0.0

    def place(self, model: nn.Module) -> None:
        """Empty storage for every parameter."""
        materialise(model)
        self.module = model

    def start(self) -> None:
        """Velocities come with the first update."""

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        """What is updated."""
        return [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]

    def slices(self) -> list[RowSlice]:
        """All rows of everything."""
        return [
            RowSlice(name, tuple(weight.shape), 0, weight.shape[0] if weight.dim() else 1, weight)
            for name, weight in self.module.named_parameters()
        ]

    def forward_backward(self, loss_function: LossFunction, *, is_last: bool) -> float:
        """Gradients add up in place."""
        loss = loss_function(self.module)
        loss.backward()
        return float(loss.detach())

    def reduce(self, loss: float, votes: Sequence[float] = ()) -> StepTotals:
        """One rank's are all there are."""
        gradients = [weight.grad for _, weight in self.trainable() if weight.grad is not None]
        self._gradient_norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        return StepTotals(loss=loss, gradient_norm=self._gradient_norm, votes=tuple(votes))

    def examine(self, loss_function: LossFunction) -> bool:
        """Whether gradients of a micro-batch are finite."""
        loss_function(self.module).backward()
        finite = all(bool(w.grad.isfinite().all()) for _, w in self.trainable() if w.grad is not None)
        self.skip_step()
        return finite

    @torch.no_grad()
    def step(self, learning_rate: float, clip_norm: float | None) -> None:
        """Clip, add to the velocity, move along it."""
        clipped = clip_norm is not None and self._gradient_norm > clip_norm
        factor = clip_norm / self._gradient_norm if clip_norm is not None and clipped else 1.0
        for _, weight in self.trainable():
            if weight.grad is not None:
                velocity = self._velocity.setdefault(weight, torch.zeros_like(weight))
                velocity.mul_(MOMENTUM).add_(weight.grad, alpha=factor)
                weight.sub_(velocity, alpha=learning_rate)
                self._updates[weight] = self._updates.get(weight, 0) + 1
        self.skip_step()

    def skip_step(self) -> None:
        """Drop the gradients."""
        self.module.zero_grad(set_to_none=True)

    def state(self) -> list[ParameterState]:
        """Weights and velocities."""
        return [self._state_of(piece) for piece in self.slices()]

    def _state_of(self, piece: RowSlice) -> ParameterState:
        velocity = self._velocity.get(piece.local)
        held = {} if velocity is None else {VELOCITY: velocity}
        return ParameterState(piece, held, self._updates.get(piece.local, 0))

    def restore(self, state: Sequence[ParameterState]) -> None:
        """What `state` gave."""
        for each in state:
            if each.optimizer:
                require_state_names(each.optimizer, [VELOCITY])
                self._velocity[each.rows.local] = each.optimizer[VELOCITY]
                self._updates[each.rows.local] = each.updates

    def finish(self) -> None:
        """Velocities are not exported."""
        self._velocity.clear()

    def state_bytes(self) -> int:
        """Weights and velocities, fp32."""
        return sum(weight.numel() * (8 if weight.requires_grad else 4) for weight in self.module.parameters())

    def require_equal(self, moment: str) -> None:
        """With whom?"""

    def wire_use(self) -> WireUse:
        """Nothing travels."""
        return WireUse({})
