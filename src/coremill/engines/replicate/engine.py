"""Replicate: the whole model on every rank, gradients summed while backward runs.

A hook on each parameter sees its gradient made; a bucket of them is sent as soon as it is whole. In bf16 the module
computes with bf16 weights while fp32 masters are what the optimizer moves, and gradients are added up in fp32 over
micro-batches and ranks, so no update is lost to rounding.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from coremill.engines.base import LossFunction, StepTotals, drop_gradients, sum_of_squares
from coremill.engines.held_base import HeldBase
from coremill.engines.optimizers import OptimizerSettings
from coremill.engines.replicate.cost import LEAST_BUCKET_BYTES, bucket_mib, most_buckets_in_flight
from coremill.engines.replicate.named_rows import AllReduceOfRows, NamedRows, lookups_of
from coremill.engines.replicate.replicas import require_equal_replicas
from coremill.engines.update import OptimizerUpdate, row_slice
from coremill.engines.wire.codec import Codec, shares_of
from coremill.engines.wire.collectives import AllReduce, BufferPool
from coremill.engines.wire.exchange import Exchange
from coremill.model.build import names_kept_in_fp32
from coremill.model.slices import RowSlice, has_base_apart, is_saved, materialise, narrow
from coremill.plan.types import Choice
from coremill.world.group import World


@dataclass(eq=False)
class _Bucket:
    """Gradients that are sent together."""

    weights: list[nn.Parameter]
    made: int = 0  # in the pass that sends

    @property
    def is_whole(self) -> bool:
        return self.made == len(self.weights)


class ReplicateEngine(OptimizerUpdate):
    name = "replicate"

    def __init__(
        self,
        world: World,
        optimizer: OptimizerSettings,
        *,
        compute_dtype: torch.dtype,
        gradient_codec: Codec,
        why_wire: str,
        named_rows: bool = True,
    ) -> None:
        super().__init__(world, optimizer)
        self._names_rows = named_rows and world.size > 1
        self._compute_dtype = compute_dtype
        self._codec = gradient_codec
        self._pool = BufferPool()
        self._wire = Exchange(self._meter, world.flows)
        self.exchange = Choice("wire", why_wire if world.size > 1 else "one rank: nothing is exchanged")
        self._base: HeldBase | None = None
        self._tables: dict[nn.Parameter, NamedRows] = {}  # of which not all rows are sent
        # What the optimizer moves, where that is not the weight that is computed with: fp32 for bf16; the same memory
        # for a table in fp32, whose gradient is added up here and arrives there, and for bf16 weights without a copy in
        # fp32, whose gradients have one.
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._made: set[nn.Parameter] = set()  # weights with a gradient in this step; a master's holds part of it
        self._pass: Literal["adds", "sends", "moves", "is looked at"] = "adds"
        self._buckets: list[_Bucket] = []  # in the order in which they are sent
        self._sent = 0  # of these, in this pass
        self._under_way: deque[tuple[AllReduce | AllReduceOfRows, list[nn.Parameter]]] = deque()

    def place(self, model: nn.Module) -> None:
        """Empty storage for every parameter but those of a base that stays as it is: fp32, which become the masters, or
        what is computed with where there are none."""
        if has_base_apart(model):
            self._base = HeldBase(self._world, model, self._compute_dtype)
        if not self._optimizer_settings.has_masters:
            narrow(model, self._compute_dtype, but=names_kept_in_fp32(model, self._compute_dtype))
        materialise(model)
        self.module = model

    def start(self) -> None:
        """Masters where the arithmetic is bf16, buckets where there are peers; all have loaded the same."""
        if self._base is not None:
            self._base.arrived()
        self.require_equal("after loading")
        if self._names_rows:
            self._tables = {table: NamedRows(embedding) for table, embedding in lookups_of(self.module)}
        kept = names_kept_in_fp32(self.module, self._compute_dtype)
        for name, weight in self.module.named_parameters():
            if not is_saved(self.module, weight):
                continue  # a base, in the dtype it is computed with
            if self._compute_dtype != torch.float32 and name not in kept and self._optimizer_settings.has_masters:
                master = nn.Parameter(weight.data, requires_grad=weight.requires_grad)
                if weight.requires_grad and not self.moves_inside:
                    master.grad = torch.zeros_like(master)
                weight.data = master.data.to(self._compute_dtype)
                self._masters[weight] = master
            elif weight in self._tables or (weight.requires_grad and weight.dtype != torch.float32):
                self._masters[weight] = holder = nn.Parameter(weight.data)
                if holder.dtype != torch.float32:
                    holder.grad_dtype = torch.float32
        self._buckets = _buckets(self.module, tables=self._tables) if self._world.size > 1 else []
        # Autograd's side holds these where no garbage collector looks: they must not hold the engine.
        engine = weakref.proxy(self)
        self._bucket_of = {weight: bucket for bucket in self._buckets for weight in bucket.weights}
        for weight in self.module.parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(lambda weight: engine._is_made(weight))
        self._make_optimizer()

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        """The fp32 weights that are trained: the module's own, or the masters."""
        return [(name, self._masters.get(weight, weight)) for name, weight in self._trained()]

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]

    def slices(self) -> list[RowSlice]:
        named = self.module.named_parameters()
        saved = [(name, weight) for name, weight in named if is_saved(self.module, weight)]
        return [row_slice(name, weight, self._masters.get(weight, weight)) for name, weight in saved]

    def forward_backward(self, loss_function: LossFunction, *, is_last: bool) -> float:
        """One micro-batch; buckets are sent during the last one's backward."""
        self._pass = "sends" if is_last and self._buckets else "moves" if is_last and self.moves_inside else "adds"
        loss = loss_function(self.module)
        self._look_at_loss(loss)
        loss.backward()
        if self._pass == "sends":
            self._send_all()
        elif self._pass == "moves":
            self._move_left()
        return float(loss.detach())

    def reduce(self, loss: float, votes: Sequence[float] = ()) -> StepTotals:
        """The exchange ended with backward; every rank holds the same gradients."""
        is_used = {self._masters.get(weight, weight): weight in self._made for _, weight in self._trained()}
        if not self._buckets:
            drop_gradients(is_used)  # a master's would be the step before's
        gradients = [weight.grad.reshape(-1) for _, weight in self.trainable() if weight.grad is not None]
        if self.moves_inside:  # all but what is left for `step`
            squares = (self._squares + sum_of_squares(gradients)) / self._world.size
            return self._agree(loss, squares, votes, is_used)
        # They are the same everywhere: each rank takes the norm of a share, which all agree on.
        squares = sum_of_squares(shares_of(gradients, self._world.size)[self._world.rank])
        return self._agree(loss, squares, votes, is_used)

    def examine(self, loss_function: LossFunction) -> bool:
        """On the bare model: nothing is exchanged."""
        self._pass = "is looked at"
        loss_function(self.module).backward()
        gradients = [weight.grad for weight in self.module.parameters() if weight.grad is not None]
        finite = all(bool((g._values() if g.is_sparse else g).isfinite().all()) for g in gradients)
        self.module.zero_grad(set_to_none=True)
        return finite

    def skip_step(self) -> None:
        """bf16 weights follow their masters, whose gradients stay allocated and are overwritten by the next step."""
        self.module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, master in self._masters.items():
                if weight.dtype == master.dtype or self.moves_inside:
                    master.grad = None
                # Inside of backward, all but what was moved at the end: this rank had no use for it.
                is_behind = not self.moves_inside or weight not in self._made
                if weight.dtype != master.dtype and weight.requires_grad and is_behind:
                    weight.copy_(master)
        self._made.clear()

    def require_equal(self, moment: str) -> None:
        """To the bit, in fp32; frozen ones too, but for a base, whose files hosts have compared."""
        require_equal_replicas(self._world, [(piece.name, piece.local) for piece in self.slices()], moment)

    def _is_made(self, weight: nn.Parameter) -> None:
        """Autograd has put a gradient in place."""
        if self._pass == "is looked at":
            return
        if self.moves_inside and not self._buckets:
            # Of earlier passes it is added up where it is, in the dtype that it is made in.
            self._made.add(weight)
            if self._pass == "moves":
                gradient, weight.grad = weight.grad, None
                assert gradient is not None
                self._move_made(weight, gradient)
            return
        if weight in self._masters:
            self._fold(weight)
        self._made.add(weight)
        if self._pass == "sends":
            self._bucket_of[weight].made += 1
            while self._sent < len(self._buckets) and self._buckets[self._sent].is_whole:
                self._send_next()

    def _fold(self, weight: nn.Parameter) -> None:
        """Move a gradient into its master's fp32 one; freed at once."""
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        master = self._masters[weight]
        if weight in self._tables:
            self._tables[weight].add(gradient, self._gradient(weight))
        elif master.grad is None:
            master.grad = gradient.to(torch.float32)
        elif weight in self._made:
            master.grad += gradient
        else:
            master.grad.copy_(gradient)

    def _move_made(self, weight: nn.Parameter, gradient: torch.Tensor) -> bool:
        """By a gradient that is whole; the weight that is computed with follows its master at once."""
        owner = self._masters.get(weight, weight)
        if owner.dtype == torch.float32:
            gradient = gradient.to(torch.float32)
        is_moved = self._move(owner, gradient, is_used=weight in self._made)
        if weight.dtype != owner.dtype:
            weight.data.copy_(owner.data)
        return is_moved

    def _move_left(self) -> None:
        """What earlier passes had a use for and the last one had not."""
        for _, weight in self._trained():
            gradient, weight.grad = weight.grad, None
            if gradient is not None:
                self._move_made(weight, gradient)

    def _finish_first(self) -> None:
        """The oldest exchange under way; where weights move inside of backward, those of it."""
        exchange, weights = self._under_way.popleft()
        exchange.finish()
        for weight in weights if self.moves_inside else ():
            owner = self._masters.get(weight, weight)
            assert owner.grad is not None
            if self._move_made(weight, owner.grad):
                owner.grad = None

    def _send_next(self) -> None:
        """Start the exchange of a bucket and move the earlier ones on."""
        self._make_room()
        weights = self._buckets[self._sent].weights
        gradients = [self._gradient(weight) for weight in weights]
        self._sent += 1
        group, wire = self._world.group, self._wire
        started: AllReduce | AllReduceOfRows
        if weights[0] in self._tables:
            started = self._tables[weights[0]].sum(gradients[0], group, wire, self._codec)
        else:
            started = AllReduce(gradients, group, wire, self._pool, self._codec)
        for earlier, _ in self._under_way:
            earlier.advance(waits=False)
        while self.moves_inside and self._under_way and self._under_way[0][0].is_done:
            self._finish_first()
        self._under_way.append((started, weights))

    def _make_room(self) -> None:
        """A rank that is ahead just now waits only where too many are under way. Of the newest, not all is sent yet: it
        goes on where all ranks do the same."""
        while len(self._under_way) > 1:
            held = [exchange.held_bytes for exchange, _ in self._under_way if exchange.held_bytes]
            if len(held) < most_buckets_in_flight(max(held, default=0)):
                return
            self._finish_first()

    def _gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """In fp32; zeros where this rank had no use for the weight in the whole step."""
        owner = self._masters.get(weight, weight)
        if owner.grad is None:
            owner.grad = torch.zeros_like(owner, dtype=torch.float32)
        elif owner is not weight and weight not in self._made:
            owner.grad.zero_()  # it was the step before's
        return owner.grad

    def _send_all(self) -> None:
        """Backward is through: send what is left, and end every exchange."""
        while self._sent < len(self._buckets):
            self._send_next()
        for exchange, _ in self._under_way:  # what is still to be sent, before anything is waited for that is not
            exchange.advance(waits=False)
        while self._under_way:
            self._finish_first()
        self._sent = 0
        for bucket in self._buckets:
            bucket.made = 0


def _buckets(model: nn.Module, tables: Collection[nn.Parameter]) -> list[_Bucket]:
    """Each so large (cost.py) or one parameter, the same on every rank, in the order in which they are whole.

    Backward makes gradients from the end of the model to its beginning, but a norm's after those of all products that
    read it: in one bucket with these, it would keep back a layer. So vectors come behind the matrices, and lookups, of
    which each is a bucket, last."""
    most_bytes = 2**20 * bucket_mib(sum(weight.nbytes for weight in model.parameters() if weight.requires_grad))
    trained = [weight for weight in reversed(list(model.parameters())) if weight.requires_grad and weight not in tables]
    ordered = [weight for weight in trained if weight.dim() > 1] + [weight for weight in trained if weight.dim() <= 1]
    left_bytes = sum(weight.nbytes for weight in ordered)
    buckets: list[_Bucket] = []
    room = 0
    for weight in ordered:
        if weight.nbytes > room:
            buckets.append(_Bucket([]))
            room = min(most_bytes, max(LEAST_BUCKET_BYTES, left_bytes // 2))
        buckets[-1].weights.append(weight)
        room -= weight.nbytes
        left_bytes -= weight.nbytes
    return buckets + [_Bucket([table]) for table in tables]
