"""How an engine moves its weights where an optimizer of engines/optimizers/ does that: all of coremill's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from coremill.engines.base import Engine, ParameterState
from coremill.engines.optimizers import OptimizerSettings
from coremill.engines.optimizers.cost import WEIGHT_BYTES


class OptimizerUpdate(Engine):
    """The half of an engine that begins where gradients are reduced; what it leaves to `skip_step` is to publish the
    weights as they are and to drop the gradients."""

    def __init__(self, optimizer: OptimizerSettings) -> None:
        self._optimizer_settings = optimizer
        self._gradient_norm = 0.0  # of all ranks, as `reduce` found it

    def _make_optimizer(self) -> None:
        """At the end of `start`: over weights that are where they stay."""
        self._optimizer = self._optimizer_settings.make(self.module, self.trainable())

    def step(self, learning_rate: float, clip_norm: float | None) -> None:
        if clip_norm is not None and self._gradient_norm > clip_norm:
            for _, weight in self.trainable():
                if weight.grad is not None:
                    weight.grad.mul_(clip_norm / self._gradient_norm)
        self._optimizer.update(learning_rate)
        self.skip_step()

    def state(self) -> list[ParameterState]:
        return [ParameterState(piece, *self._optimizer.state_of(piece.local)) for piece in self.slices()]

    def restore(self, state: Sequence[ParameterState]) -> None:
        for each in state:
            self._optimizer.restore(each.rows.local, each.optimizer, each.updates)

    def finish(self) -> None:
        """The optimizer's state, twice the size of the weights, is not exported."""
        del self._optimizer

    def state_bytes(self) -> int:
        """fp32 weights, and the optimizer's of those that are trained."""
        beside = self._optimizer_settings.state_bytes
        return sum(
            math.prod(piece.shape) * (WEIGHT_BYTES + (beside if piece.local.requires_grad else 0))
            for piece in self.slices()
        )
