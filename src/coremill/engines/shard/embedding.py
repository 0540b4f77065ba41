"""A lookup table cut by rows: a rank fetches the rows that its tokens name, and sends back the gradients of those only.

Gathered whole, a table comes first in forward and its gradient, nearly all zeros, leaves last in backward: the two
moments of a step with no arithmetic to hide behind. A rank's tokens name a few hundred or thousand of its rows. So each
rank tells the others which of their rows it needs, by one byte for each row they hold, and is sent those; gradients go
the same way back and are added up in fp32 and in rank order, as all others are. Neither the table nor its gradient is
ever whole on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from coremill.engines.wire.codec import Codec
from coremill.engines.wire.collectives import ReduceScatter
from coremill.engines.wire.exchange import Exchange, peers_of
from coremill.model.slices import rows_of_rank


@dataclass(frozen=True)
class _Pass:
    """Whose rows are needed where in one forward pass."""

    wanted: list[int]  # how many rows this rank needs of each rank's
    asked: list[torch.Tensor]  # which of its own each rank needs, counted from this rank's first


@dataclass(frozen=True)
class _Asked:
    """Rows on their way here."""

    token_ids: torch.Tensor
    seen: torch.Tensor  # each of them once, sorted
    places: torch.Tensor  # where each token is among those
    rows: torch.Tensor  # whole after `wait`
    wait: Callable[[], None]
    passed: _Pass


class ShardedEmbedding:
    """Takes the place of an embedding's forward; its weight becomes a DTensor of this rank's rows, still on meta."""

    def __init__(
        self,
        embedding: nn.Embedding,
        mesh: DeviceMesh,
        exchange: Exchange,
        reduce_scatter: ReduceScatter,
        codec: Codec,
        *,
        wire_dtype: torch.dtype,
        compute_dtype: torch.dtype,
    ) -> None:
        self._group: dist.ProcessGroup = mesh.get_group()
        self._exchange = exchange
        self._reduce_scatter = reduce_scatter
        self._codec = codec
        self._wire_dtype = wire_dtype
        self._compute_dtype = compute_dtype
        self._padding_id = embedding.padding_idx
        whole, ranks = embedding.weight, self._group.size()
        self._held = [rows_of_rank(whole.shape[0], rank, ranks) for rank in range(ranks)]
        begin, end = self._held[self._group.rank()]
        rows = torch.empty(end - begin, whole.shape[1], dtype=whole.dtype, device="meta")
        self.parameter = nn.Parameter(
            DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()),
            requires_grad=whole.requires_grad,
        )
        self.rows: nn.Parameter | None = None  # this rank's, as the optimizer moves them; set before the first step
        self._gradient: torch.Tensor | None = None
        self._asked: _Asked | None = None  # and not looked up yet
        embedding.weight = self.parameter
        embedding.forward = self._look_up  # type: ignore[method-assign, assignment]

    def take_gradient(self) -> torch.Tensor | None:
        """Of this rank's rows, added up since the last call; after the exchange has been flushed. None if frozen."""
        gradient, self._gradient = self._gradient, None
        return gradient

    def ask(self, token_ids: torch.Tensor) -> None:
        """Ask for the rows of these tokens, which are looked up next; ranks wait here until all have asked."""
        assert self.rows is not None
        ranks, held = self._group.size(), self.rows.shape[0]
        count = self._held[-1][1]
        seen, places = token_ids.flatten().unique(return_inverse=True)
        if seen.numel() and not 0 <= int(seen[0]) <= int(seen[-1]) < count:
            raise IndexError(f"token {int(seen[-1])} or {int(seen[0])} is not among the {count} rows of the table")
        needed = torch.zeros(count, dtype=torch.uint8)
        needed[seen] = 1
        needs = needed.split([end - begin for begin, end in self._held])
        needed_here = torch.empty(ranks, held, dtype=torch.uint8)
        self._swap(needs, list(needed_here))()
        wanted = [int(need.sum()) for need in needs]
        asked = [need.nonzero().flatten() for need in needed_here]
        rows = torch.empty(len(seen), self.rows.shape[1], dtype=self._wire_dtype)
        wait = self._swap([self.rows.detach()[each].to(self._wire_dtype) for each in asked], rows.split(wanted))
        self._asked = _Asked(token_ids, seen, places, rows, wait, _Pass(wanted, asked))

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._asked is None or self._asked.token_ids is not token_ids:
            self.ask(token_ids)
        asked, self._asked = self._asked, None
        assert asked is not None
        rows: torch.Tensor = _Fetch.apply(self.rows, self, asked)  # type: ignore[no-untyped-call]
        padding = None
        if self._padding_id is not None and self._padding_id in asked.seen:
            padding = int((asked.seen == self._padding_id).nonzero())
        # In fp32, so that gradients of equal tokens are added up before they are rounded.
        return F.embedding(asked.places.view_as(token_ids), rows, padding).to(self._compute_dtype)

    def _swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Tensor r of `outgoing` becomes rank r's `incoming` of this rank, once what is returned has waited."""
        mine = self._group.rank()
        incoming[mine].copy_(outgoing[mine])
        return self._exchange.ahead_of_queue("gather", self._group, incoming, outgoing)

    def send_gradients(self, gradients: torch.Tensor, passed: _Pass) -> None:
        """Send gradients of fetched rows to who holds them; what arrives here is added when the exchange is flushed."""
        if self._reduce_scatter.look is not None:
            self._reduce_scatter.look(gradients)
        assert self.rows is not None
        codec, shape, mine = self._codec, self.rows.shape, self._group.rank()

        def wires_for(rows: Sequence[int]) -> list[torch.Tensor]:
            return [torch.empty(codec.length([each * shape[1]]), dtype=codec.dtype) for each in rows]

        parts, asked = gradients.split(passed.wanted), [len(each) for each in passed.asked]
        held_bytes = gradients.nbytes + codec.dtype.itemsize * sum(
            codec.length([rows * shape[1]]) for rows in (*passed.wanted, *asked)
        )
        # While weights stay gathered, nothing else ends the exchanges of earlier passes.
        self._reduce_scatter.make_room(held_bytes)
        outgoing, incoming = wires_for(passed.wanted), wires_for(asked)
        for rank in peers_of(self._group):
            codec.encode(parts[rank].reshape(-1), [parts[rank].numel()], outgoing[rank])
        flight = self._exchange.all_to_all("reduce_scatter", self._group, incoming, outgoing)

        def finish() -> None:
            flight.wait()
            if self._gradient is None:
                self._gradient = torch.zeros(shape)
            for rank, rows in enumerate(passed.asked):
                values = parts[mine]
                if rank != mine:
                    values = torch.empty(len(rows), shape[1])
                    codec.decode(incoming[rank], [values.numel()], values.view(-1))
                self._gradient.index_add_(0, rows, values)

        self._reduce_scatter.follow(finish, held_bytes)


class _Fetch(torch.autograd.Function):
    """Rows from whoever holds them; their gradients go back there, so that none is left to return."""

    @staticmethod
    def forward(ctx: Any, own_rows: torch.Tensor, table: ShardedEmbedding, asked: _Asked) -> torch.Tensor:
        ctx.table, ctx.passed = table, asked.passed
        asked.wait()
        return asked.rows.float()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.table.send_gradients(upstream, ctx.passed)
        return None, None, None
