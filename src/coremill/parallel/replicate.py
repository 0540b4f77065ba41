"""Replicate: the whole model on every rank, gradients summed while backward runs (DDP with a hook of our own).

One rank needs no wrapper at all. In bf16 the module computes with bf16 weights while fp32 masters are what the
optimizer moves, and gradients are added up in fp32 over micro-batches and ranks, so no update is lost to rounding.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from coremill.model.slices import RowSlice, materialise, model_name
from coremill.parallel.codec import Codec
from coremill.parallel.collectives import BufferPool, SumOverRanks
from coremill.parallel.engine import LossFunction, StepTotals, WireUse, agree, sum_of_squares
from coremill.parallel.exchange import Exchange, WireMeter
from coremill.plan.types import Choice
from coremill.plan.wire import bucket_mib
from coremill.world import World


@dataclass(frozen=True)
class _BucketExchange:
    """A bucket of gradients on its way."""

    sum: SumOverRanks
    weights: list[nn.Parameter]
    total: torch.Tensor  # fp32; the bucket itself where the arithmetic is fp32
    bucket: torch.Tensor
    done: torch.futures.Future[torch.Tensor]


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
        self._folding = True
        self._buckets_are_final = False
        self._exchanges: deque[_BucketExchange] = deque()

    def place(self, model: nn.Module) -> None:
        """Empty fp32 storage for every parameter."""
        materialise(model)
        self._model = model

    def start(self) -> None:
        """Masters where the arithmetic is bf16, DDP where there are peers."""
        if self._compute_dtype != torch.float32:
            self._keep_masters()
        self._module: nn.Module = self._model
        if self._world.size > 1:
            with warnings.catch_warnings():
                # torch 2.13 wants another name for broadcast_buffers that torch 2.11 does not know.
                warnings.simplefilter("ignore", FutureWarning)
                wrapped = DistributedDataParallel(
                    self._model,
                    bucket_cap_mb=bucket_mib(sum(weight.nbytes for weight in self._model.parameters())),
                    gradient_as_bucket_view=True,
                    broadcast_buffers=False,
                    init_sync=False,  # every rank has read the same weights
                )
            # DDP compares annotations with classes, and ours are text: the lambda has none.
            wrapped.register_comm_hook(None, lambda _, bucket: self._exchange_bucket(bucket))  # type: ignore[arg-type, return-value]
            self._module = wrapped

    @property
    def module(self) -> nn.Module:
        """What to call for a forward pass."""
        return self._module

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
        """One micro-batch; DDP's hook sends buckets during the last one's backward."""
        has_peers = self._world.size > 1
        self._folding = not (is_last and has_peers)
        with self._module.no_sync() if has_peers and not is_last else nullcontext():  # type: ignore[operator]
            loss = loss_function(self._module)
            loss.backward()
        return float(loss.detach())

    def reduce(self, loss: float, votes: Sequence[float] = ()) -> StepTotals:
        """The exchange ended with backward; every rank holds the same gradients."""
        squares = sum_of_squares(weight.grad for _, weight in self.parameters() if weight.grad is not None)
        # The norms are equal unless a rank's memory fails it: what one of them cannot use, none does.
        total_loss, unusable, *total_votes = agree(
            self._world, [loss, float(not math.isfinite(squares)), *votes], self._meter
        )
        norm = math.nan if unusable else squares**0.5
        return StepTotals(loss=total_loss, gradient_norm=norm, votes=tuple(total_votes))

    def examine(self, loss_function: LossFunction) -> bool:
        """On the bare model: nothing is exchanged."""
        self._folding = False
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
        if not self._buckets_are_final:
            # DDP arranges them anew after the first step: buffers of the old sizes would lie idle for ever.
            self._pool.clear()
            self._buckets_are_final = True

    def wire_use(self) -> WireUse:
        """Since the last call."""
        return WireUse(self._meter.take())

    def _keep_masters(self) -> None:
        for weight in self._model.parameters():
            master = nn.Parameter(weight.data)
            master.grad = torch.zeros_like(master)
            weight.data = master.data.to(self._compute_dtype)
            self._masters[weight] = master
            weight.register_post_accumulate_grad_hook(self._fold)

    def _fold(self, weight: torch.Tensor) -> None:
        """Move a bf16 gradient into its master's fp32 one; freed at once."""
        if not self._folding or weight.grad is None:
            return
        assert isinstance(weight, nn.Parameter)
        self._add_to_master(weight, weight.grad)
        weight.grad = None

    def _master_gradient(self, weight: nn.Parameter) -> torch.Tensor:
        gradient = self._masters[weight].grad
        assert gradient is not None
        return gradient

    def _add_to_master(self, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        master_gradient = self._master_gradient(weight)
        if weight in self._folded:
            master_gradient += gradient
        else:
            master_gradient.copy_(gradient)
            self._folded.add(weight)

    def _exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's hook: start this bucket's exchange, move the earlier ones on, end them all with the last bucket."""
        weights = cast(list[nn.Parameter], bucket.parameters())
        runs = [weight.numel() for weight in weights]
        total = bucket.buffer()
        if self._masters:
            for weight, gradient in zip(weights, bucket.gradients(), strict=True):
                self._add_to_master(weight, gradient)
            total = torch.cat([self._master_gradient(weight).view(-1) for weight in weights])
        exchange = _BucketExchange(
            sum=SumOverRanks(total, runs, self._world.group, self._wire, self._pool, self._codec),
            weights=weights,
            total=total,
            bucket=bucket.buffer(),
            done=torch.futures.Future(),
        )
        for earlier in self._exchanges:
            earlier.sum.advance()
        self._exchanges.append(exchange)
        if bucket.is_last():
            for each in self._exchanges:  # the second half of all of them under way before the first is waited for
                each.sum.advance()
            while self._exchanges:
                self._end(self._exchanges.popleft())
        return exchange.done

    def _end(self, exchange: _BucketExchange) -> None:
        exchange.sum.finish()
        if self._masters:
            gradients = [self._master_gradient(weight) for weight in exchange.weights]
            pieces = exchange.total.split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
        exchange.done.set_result(exchange.bucket)
