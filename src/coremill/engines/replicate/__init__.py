"""Replicate: the whole model on every rank."""

from __future__ import annotations

from coremill.engines.replicate.cost import ReplicateCost


class Replicate:
    """What the registry knows of it; importable without torch."""

    name = "replicate"
    cost = ReplicateCost()
