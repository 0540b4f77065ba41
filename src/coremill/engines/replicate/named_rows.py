"""The gradient of a lookup table: zeros but for rows that tokens named. Replicate sends those that any rank named.

Sent whole, it would be the last of all, with no arithmetic left to hide behind. torch makes such gradients sparse where
a lookup asks for it, and dense where the table has another use besides: then every row counts as named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from coremill.engines.replicate.cost import LEAST_BUCKET_BYTES, sends_rows
from coremill.engines.wire.codec import Codec
from coremill.engines.wire.collectives import AllReduce, BufferPool
from coremill.engines.wire.exchange import Exchange
from coremill.model.build import has_plain_lookup


def lookups_of(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Embedding]]:
    """Trained tables that are a lookup's and nobody else's, of a size that is worth asking which rows are needed."""
    owners = Counter(weight for module in model.modules() for weight in module._parameters.values())
    for module in model.modules():
        table = module._parameters.get("weight")
        if not has_plain_lookup(module) or table is None or owners[table] > 1:
            continue
        if table.requires_grad and table.nbytes >= LEAST_BUCKET_BYTES:
            yield table, module


class NamedRows:
    """Which rows of a lookup's table have a gradient in this step."""

    def __init__(self, embedding: nn.Embedding) -> None:
        embedding.sparse = True
        self._named = torch.zeros(embedding.num_embeddings, dtype=torch.uint8)

    def add(self, gradient: torch.Tensor, total: torch.Tensor) -> None:
        """One pass's gradient to those of the step, in fp32."""
        if not gradient.is_sparse:
            self._named.fill_(1)
            total += gradient
            return
        rows, values = gradient._indices()[0], gradient._values()
        self._named[rows] = 1
        total.index_add_(0, rows, values.to(total.dtype))

    def sum(self, total: torch.Tensor, group: dist.ProcessGroup, exchange: Exchange, codec: Codec) -> AllReduceOfRows:
        """Start the exchange that ends the step; the next one names rows anew."""
        named, self._named = self._named, torch.zeros_like(self._named)
        return AllReduceOfRows(total, named, group, exchange, codec)


class AllReduceOfRows:
    """The sum over ranks of gradients that are zeros but for named rows; advanced like `AllReduce`.

    First each rank tells the others which rows it has, by a byte a row; then all sum those that any of them has."""

    def __init__(
        self, total: torch.Tensor, named: torch.Tensor, group: dist.ProcessGroup, exchange: Exchange, codec: Codec
    ) -> None:
        self._total = total
        self._group = group
        self._exchange = exchange
        self._codec = codec
        self._named = torch.empty(group.size(), len(named), dtype=torch.uint8)
        self._named[group.rank()] = named
        self._wait = exchange.ahead_of_queue("all_reduce", group, list(self._named), [named] * group.size())
        self._sum: AllReduce | None = None

    @property
    def is_done(self) -> bool:
        return self._sum is not None and self._sum.is_done

    @property
    def held_bytes(self) -> int:
        return self._sum.held_bytes if self._sum else 0

    def advance(self, *, waits: bool = True) -> bool:
        if self._sum is None:
            self._wait()
            self._rows = self._named.any(dim=0).nonzero().flatten()
            self._is_in_place = not sends_rows(len(self._rows), len(self._total))
            self._summed = self._total if self._is_in_place else self._total[self._rows]
            # Of another size in every step: no buffers to keep.
            pool = BufferPool(keep_up_to_numel=0)
            self._sum = AllReduce([self._summed], self._group, self._exchange, pool, self._codec)
            return False
        if not self._sum.advance(waits=waits):
            return False
        if not self._is_in_place:
            self._total.index_copy_(0, self._rows, self._summed)
        return True

    def finish(self) -> None:
        while not self.advance():
            pass
