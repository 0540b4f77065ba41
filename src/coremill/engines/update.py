"""How an engine moves its weights where an optimizer of engines/optimizers/ does that: all of coremill's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from coremill.engines.base import Engine, ParameterState, StepAgreement, StepTotals, WireUse
from coremill.engines.optimizers import OptimizerSettings
from coremill.engines.optimizers.cost import WEIGHT_BYTES
from coremill.engines.wire.exchange import WireMeter
from coremill.model.slices import RowSlice, model_name, rows_of_rank
from coremill.world.group import World


class OptimizerUpdate(Engine):
    """The half of an engine that begins where gradients are reduced; what it leaves to `skip_step` is to publish the
    weights as they are and to drop the gradients."""

    def __init__(self, world: World, optimizer: OptimizerSettings) -> None:
        self._world = world
        self._optimizer_settings = optimizer
        self._meter = WireMeter()
        self._agreement = StepAgreement(world, self._meter)
        self._gradient_norm = 0.0  # of all ranks, as `reduce` found it

    def _agree(
        self, loss: float, squares: float, votes: Sequence[float], is_used: Mapping[nn.Parameter, bool]
    ) -> StepTotals:
        """The end of `reduce`."""
        totals = self._agreement.reach(loss=loss, squares=squares, votes=votes, is_used=is_used)
        self._gradient_norm = totals.gradient_norm
        return totals

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

    def wire_use(self) -> WireUse:
        return WireUse(self._meter.take())

    def state_bytes(self) -> int:
        """fp32 weights, and the optimizer's of those that are trained."""
        beside = self._optimizer_settings.state_bytes
        return math.ceil(
            sum(
                math.prod(piece.shape) * (WEIGHT_BYTES + (beside if piece.local.requires_grad else 0))
                for piece in self.slices()
            )
        )


def row_slice(name: str, whole: torch.Tensor, local: torch.Tensor, rank: int = 0, ranks: int = 1) -> RowSlice:
    """This rank's rows of a parameter, by the name that files have for it; all rows where ranks do not share them."""
    rows = whole.shape[0] if whole.dim() else 1
    return RowSlice(model_name(name), tuple(whole.shape), *rows_of_rank(rows, rank, ranks), local)
