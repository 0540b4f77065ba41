"""Weights that a model wants in fp32 while the rest computes in bf16 (a mixture's router, DeepSeek-V4's norms).

transformers keeps them so (`_keep_in_fp32_modules_strict`), because rounding them changes which expert a token goes to.
As a rule they are few and small, so a sharding engine does not have to know of them: this one, around it, takes them
out of its sight, holds them whole on every rank and adds up their gradients in one exchange at the end of a step. HY-V4
asks for its whole head: plan/families.py names such families, and the plan counts the head on every rank.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed
from torch import nn

from coremill.engines.base import LossFunction, StepTotals, WireUse, sum_of_squares
from coremill.engines.optimizers import OptimizerSettings
from coremill.engines.replicate.replicas import require_equal_replicas
from coremill.engines.update import OptimizerUpdate, row_slice
from coremill.model.build import names_kept_in_fp32
from coremill.model.slices import RowSlice, is_saved, model_name
from coremill.world.group import World
from coremill.world.lost_peers import peer_errors


class KeepsInFp32(OptimizerUpdate):
    """A sharding engine, and beside it whole fp32 weights on every rank."""

    def __init__(
        self, inner: OptimizerUpdate, world: World, optimizer: OptimizerSettings, compute_dtype: torch.dtype
    ) -> None:
        """It moves the weights of both: what `inner` would do in a step of its own is left to it."""
        super().__init__(world, optimizer)
        self._inner = inner
        self._compute_dtype = compute_dtype
        self._weights: dict[str, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []  # where the model has them
        self._used: set[nn.Parameter] = set()  # by this rank, in this step
        self._is_finite: bool | None = None  # while gradients are only looked at
        self.name = inner.name
        self.exchange = inner.exchange

    def place(self, model: nn.Module) -> None:
        """The others as the engine does; these whole."""
        names = names_kept_in_fp32(model, self._compute_dtype)
        made: dict[nn.Parameter, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and model_name(f"{prefix}.{name}" if prefix else name) in names:
                    if parameter not in made:
                        empty = torch.empty(parameter.shape, dtype=torch.float32)
                        made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    self._places.append((module, name, made[parameter]))
        self._hide()
        self._inner.place(model)
        self._show()
        self.module = model
        self._weights = {name: weight for name, weight in model.named_parameters() if model_name(name) in names}
        engine = weakref.proxy(self)  # autograd's side holds what is given to it
        for weight in made.values():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(lambda weight: engine._is_made(weight))

    def start(self) -> None:
        """The engine starts with what it knows."""
        self._hide()
        self._inner.start()
        self._show()
        self.require_equal("after loading")
        self._make_optimizer()
        # Inside of backward, the engine moves its weights by the same one.
        self._inner._optimizer = self._optimizer

    def begin_step(self, learning_rate: float, factor: float) -> None:
        super().begin_step(learning_rate, factor)
        self._inner.begin_step(learning_rate, factor)

    def take_moving_seconds(self) -> float:
        return self._inner.take_moving_seconds()

    def finish(self) -> None:
        super().finish()
        self._inner.finish()

    def _hide(self) -> None:
        for module, name, _ in self._places:
            module._parameters[name] = None

    def _show(self) -> None:
        for module, name, weight in self._places:
            module._parameters[name] = weight

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        trained = [(name, weight) for name, weight in self._weights.items() if weight.requires_grad]
        return [*self._inner.trainable(), *trained]

    def slices(self) -> list[RowSlice]:
        """The engine's, and all rows of these."""
        saved = [(name, weight) for name, weight in self._weights.items() if is_saved(self.module, weight)]
        return [*self._inner.slices(), *(row_slice(name, weight, weight) for name, weight in saved)]

    def forward_backward(self, loss_function: LossFunction, *, is_last: bool) -> float:
        """One micro-batch; gradients of these add up where autograd leaves them."""
        return self._inner.forward_backward(loss_function, is_last=is_last)

    def reduce(self, loss: float, votes: Sequence[float] = ()) -> StepTotals:
        """The engine's exchange, then one of these."""
        totals = self._inner.reduce(loss, votes)
        self._gradient_norm = totals.gradient_norm
        trained = [weight for weight in self._weights.values() if weight.requires_grad]
        if not trained:
            return totals
        self._sum_over_ranks(trained)
        squares = sum_of_squares(weight.grad for weight in trained if weight.grad is not None)
        self._gradient_norm = (totals.gradient_norm**2 + squares) ** 0.5
        return StepTotals(loss=totals.loss, gradient_norm=self._gradient_norm, votes=totals.votes)

    @torch.no_grad()
    def _sum_over_ranks(self, weights: Sequence[nn.Parameter]) -> None:
        """In one piece, with a number for each weight: how many ranks had a use for it. If none, it stays."""
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in weights]
        users = torch.tensor([float(weight in self._used) for weight in weights])
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), users])
        if self._world.size > 1:
            began = time.perf_counter()
            with peer_errors():
                torch.distributed.all_reduce(flat, group=self._world.group)
            seconds = time.perf_counter() - began
            sent = 2 * (self._world.size - 1) * flat.nbytes // self._world.size
            self._meter.add("all_reduce", sent=sent, seconds=seconds, exposed=seconds)
        pieces = flat.split([*(weight.numel() for weight in weights), len(weights)])
        for weight, piece, count in zip(weights, pieces, pieces[-1].tolist(), strict=False):
            weight.grad = piece.view(weight.shape) if count else None

    def examine(self, loss_function: LossFunction) -> bool:
        """The engine's look, and one at these."""
        self._is_finite = True
        try:
            return self._inner.examine(loss_function) and self._is_finite
        finally:
            self._is_finite = None
            self._drop_gradients()

    def skip_step(self) -> None:
        self._inner.skip_step()
        self._drop_gradients()

    def require_equal(self, moment: str) -> None:
        """These are whole on every rank."""
        self._inner.require_equal(moment)
        if self._weights:
            require_equal_replicas(self._world, list(self._weights.items()), moment)

    def wire_use(self) -> WireUse:
        for kind, use in self._inner.wire_use().collectives.items():
            self._meter.add(
                kind, sent=use.bytes, shared=use.shared_bytes, seconds=use.seconds, exposed=use.exposed_seconds
            )
        return super().wire_use()

    def _is_made(self, weight: nn.Parameter) -> None:
        """Autograd has put a gradient in place."""
        if self._is_finite is None:
            self._used.add(weight)
        elif weight.grad is not None:
            self._is_finite &= bool(weight.grad.isfinite().all())

    def _drop_gradients(self) -> None:
        for weight in self._weights.values():
            weight.grad = None
        self._used.clear()
