"""How an engine moves its weights where an optimizer of engines/optimizers/ does that: all of coremill's own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from coremill.engines.base import Engine, ParameterState, StepAgreement, StepTotals, WireUse, sum_of_squares
from coremill.engines.optimizers import OptimizerSettings
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
        self.moves_inside = optimizer.update == "inside"
        # Of a step whose weights move inside of backward:
        self._learning_rate, self._factor = 0.0, 1.0
        self._squares = 0.0  # of the gradients so far
        self._is_broken = False  # a number is not finite: nothing is moved any more
        self._moving_seconds = 0.0

    def _agree(
        self, loss: float, squares: float, votes: Sequence[float], is_used: Mapping[nn.Parameter, bool]
    ) -> StepTotals:
        """The end of `reduce`."""
        totals = self._agreement.reach(loss=loss, squares=squares, votes=votes, is_used=is_used)
        self._gradient_norm = totals.gradient_norm
        return totals

    def _make_optimizer(self) -> None:
        """At the end of `start`: over weights that are where they stay."""
        self._optimizer = self._optimizer_settings.make(self.module, self.trainable(), self.slices())

    def begin_step(self, learning_rate: float, factor: float) -> None:
        self._learning_rate, self._factor = learning_rate, factor
        self._squares, self._is_broken = 0.0, False
        self._optimizer.begin_step()

    def take_moving_seconds(self) -> float:
        seconds, self._moving_seconds = self._moving_seconds, 0.0
        return seconds

    def _look_at_loss(self, loss: torch.Tensor) -> None:
        """Before backward: where any rank's is not finite, no rank moves anything."""
        if self.moves_inside and self._world.sum(float(not loss.isfinite())):
            self._is_broken = True

    def _move(self, weight: torch.Tensor, gradient: torch.Tensor, *, is_used: bool = True) -> bool:
        """Inside of backward, by a gradient that is whole. False: it is to be kept until `step`, for this rank had no
        use for the weight, and only then does it know whether another had."""
        if not is_used:
            return False
        began = time.perf_counter()
        self._squares += sum_of_squares([gradient])
        self._is_broken = self._is_broken or not math.isfinite(self._squares)
        if not self._is_broken:
            self._optimizer.move(weight, gradient, self._learning_rate, self._factor)
        self._moving_seconds += time.perf_counter() - began
        return True

    def step(self, learning_rate: float, clip_norm: float | None) -> None:
        if self.moves_inside:
            for _, weight in self.trainable():
                if weight.grad is not None:
                    self._optimizer.move(weight, weight.grad, self._learning_rate, self._factor)
            self.skip_step()
            return
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
        """Weights as they are kept, and the optimizer's of those that are trained."""
        beside = self._optimizer_settings.state_bytes
        return math.ceil(
            sum(
                math.prod(piece.shape) * (piece.local.element_size() + (beside if piece.local.requires_grad else 0))
                for piece in self.slices()
            )
        )


def row_slice(name: str, whole: torch.Tensor, local: torch.Tensor, rank: int = 0, ranks: int = 1) -> RowSlice:
    """This rank's rows of a parameter, by the name that files have for it; all rows where ranks do not share them."""
    rows = whole.shape[0] if whole.dim() else 1
    return RowSlice(model_name(name), tuple(whole.shape), *rows_of_rank(rows, rank, ranks), local)
