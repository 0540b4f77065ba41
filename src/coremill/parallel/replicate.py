"""Replicate: the whole model on every rank, gradients summed while backward runs.

A hook on each parameter sees its gradient made; a bucket of them is sent as soon as it is whole. In bf16 the module
computes with bf16 weights while fp32 masters are what the optimizer moves, and gradients are added up in fp32 over
micro-batches and ranks, so no update is lost to rounding.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from coremill.model.slices import RowSlice, materialise, model_name
from coremill.parallel.codec import Codec
from coremill.parallel.collectives import BufferPool, SumOverRanks
from coremill.parallel.engine import LossFunction, StepTotals, WireUse, agree, sum_of_squares
from coremill.parallel.exchange import Exchange, WireMeter
from coremill.plan.types import Choice
from coremill.plan.wire import bucket_mib
from coremill.world import World


@dataclass(eq=False)
class _Bucket:
    """Gradients that are sent together."""

    weights: list[nn.Parameter]
    made: int = 0  # in the pass that sends

    @property
    def is_whole(self) -> bool:
        """All are made."""
        return self.made == len(self.weights)


class ReplicateEngine:
    """The whole model on every rank."""

    name = "replicate"

    def __init__(self, world: World, *, compute_dtype: torch.dtype, gradient_codec: Codec) -> None:
        self._world = world
        self._compute_dtype = compute_dtype
        self._codec = gradient_codec
        self._meter = WireMeter()
        self._pool = BufferPool()
        self._wire = Exchange(self._meter, world.flows)
        self.exchange: Choice[Literal["memory", "wire"]] = Choice("wire", "replicate: gradients go through gloo")
        self._masters: dict[nn.Parameter, nn.Parameter] = {}  # bf16 weight -> fp32 master
        self._folded: set[nn.Parameter] = set()  # masters whose gradient already holds part of this step
        self._pass: Literal["adds", "sends", "is looked at"] = "adds"
        self._buckets: list[_Bucket] = []  # in the order in which they are sent
        self._sent = 0  # of these, in this pass
        self._under_way: deque[SumOverRanks] = deque()

    def place(self, model: nn.Module) -> None:
        """Empty fp32 storage for every parameter."""
        materialise(model)
        self._model = model

    def start(self) -> None:
        """Masters where the arithmetic is bf16, buckets where there are peers."""
        if self._compute_dtype != torch.float32:
            for weight in self._model.parameters():
                master = nn.Parameter(weight.data, requires_grad=weight.requires_grad)
                if weight.requires_grad:
                    master.grad = torch.zeros_like(master)
                weight.data = master.data.to(self._compute_dtype)
                self._masters[weight] = master
        self._buckets = _buckets(self._model) if self._world.size > 1 else []
        # Autograd's side holds these where no garbage collector looks: they must not hold the engine.
        engine = weakref.proxy(self)
        self._bucket_of = {weight: bucket for bucket in self._buckets for weight in bucket.weights}
        if self._masters or self._buckets:
            for weight in self._model.parameters():
                if weight.requires_grad:
                    weight.register_post_accumulate_grad_hook(lambda weight: engine._is_made(weight))

    @property
    def module(self) -> nn.Module:
        """What to call for a forward pass."""
        return self._model

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The fp32 weights: the module's own, or the masters."""
        return [(name, self._masters.get(weight, weight)) for name, weight in self._model.named_parameters()]

    def slices(self) -> list[RowSlice]:
        """All rows of everything."""
        return [
            RowSlice(model_name(name), tuple(weight.shape), 0, weight.shape[0] if weight.dim() else 1, weight)
            for name, weight in self.parameters()
        ]

    def forward_backward(self, loss_function: LossFunction, *, is_last: bool) -> float:
        """One micro-batch; buckets are sent during the last one's backward."""
        self._pass = "sends" if is_last and self._buckets else "adds"
        loss = loss_function(self._model)
        loss.backward()
        if self._pass == "sends":
            self._send_all()
        return float(loss.detach())

    def reduce(self, loss: float, votes: Sequence[float] = ()) -> StepTotals:
        """The exchange ended with backward; every rank holds the same gradients."""
        for weight, master in self._masters.items():
            if master.grad is not None and weight not in self._folded and not self._buckets:
                master.grad.zero_()  # of the step before: this one had no use for the weight
        squares = sum_of_squares(weight.grad for _, weight in self.parameters() if weight.grad is not None)
        # The norms are equal unless a rank's memory fails it: what one of them cannot use, none does.
        total_loss, unusable, *total_votes = agree(
            self._world, [loss, float(not math.isfinite(squares)), *votes], self._meter
        )
        norm = math.nan if unusable else squares**0.5
        return StepTotals(loss=total_loss, gradient_norm=norm, votes=tuple(total_votes))

    def examine(self, loss_function: LossFunction) -> bool:
        """On the bare model: nothing is exchanged."""
        self._pass = "is looked at"
        loss_function(self._model).backward()
        finite = all(bool(w.grad.isfinite().all()) for w in self._model.parameters() if w.grad is not None)
        self._model.zero_grad(set_to_none=True)
        return finite

    def scale_gradients(self, factor: float) -> None:
        """In place."""
        torch._foreach_mul_([weight.grad for _, weight in self.parameters() if weight.grad is not None], factor)

    def after_step(self) -> None:
        """bf16 weights follow their masters; master gradients stay allocated and are overwritten by the next step."""
        self._model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, master in self._masters.items():
                weight.copy_(master)
        self._folded.clear()

    def wire_use(self) -> WireUse:
        """Since the last call."""
        return WireUse(self._meter.take())

    def _is_made(self, weight: nn.Parameter) -> None:
        """Autograd has put a gradient in place."""
        if self._pass == "is looked at":
            return
        if self._masters:
            self._fold(weight)
        if self._pass == "sends":
            self._bucket_of[weight].made += 1
            while self._sent < len(self._buckets) and self._buckets[self._sent].is_whole:
                self._send_next()

    def _fold(self, weight: nn.Parameter) -> None:
        """Move a bf16 gradient into its master's fp32 one; freed at once."""
        total = self._masters[weight].grad
        assert total is not None and weight.grad is not None
        if weight in self._folded:
            total += weight.grad
        else:
            total.copy_(weight.grad)
            self._folded.add(weight)
        weight.grad = None

    def _send_next(self) -> None:
        """Start the exchange of a bucket and move the earlier ones on."""
        gradients = [self._gradient(weight) for weight in self._buckets[self._sent].weights]
        self._sent += 1
        started = SumOverRanks(gradients, self._world.group, self._wire, self._pool, self._codec)
        for earlier in self._under_way:
            earlier.advance()
        self._under_way.append(started)

    def _gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """In fp32; zeros where this rank had no use for the weight in the whole step."""
        master = self._masters.get(weight)
        if master is not None:
            assert master.grad is not None
            return master.grad if weight in self._folded else master.grad.zero_()
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        return weight.grad

    def _send_all(self) -> None:
        """Backward is through: send what is left, and end every exchange."""
        while self._sent < len(self._buckets):
            self._send_next()
        for exchange in self._under_way:  # the second half of all of them under way before the first is waited for
            exchange.advance()
        while self._under_way:
            self._under_way.popleft().finish()
        self._sent = 0
        for bucket in self._buckets:
            bucket.made = 0


def _buckets(model: nn.Module) -> list[_Bucket]:
    """Each so large (plan/wire.py) or one parameter, the same on every rank; backward makes gradients from the end of
    the model to its beginning."""
    most_bytes = 2**20 * bucket_mib(sum(weight.nbytes for weight in model.parameters()))
    buckets: list[_Bucket] = []
    room = 0
    for weight in reversed([weight for weight in model.parameters() if weight.requires_grad]):
        if weight.nbytes > room:
            buckets.append(_Bucket([]))
            room = most_bytes
        buckets[-1].weights.append(weight)
        room -= weight.nbytes
    return buckets
