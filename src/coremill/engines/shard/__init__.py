"""Shard: 1/N of the state on every rank, over the wire or, on one host, through memory (engines/one_host)."""

from __future__ import annotations

from coremill.engines.shard.cost import ShardCost


class Shard:
    """What the registry knows of it; importable without torch."""

    name = "shard"
    cost = ShardCost()
