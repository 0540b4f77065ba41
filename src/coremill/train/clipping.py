"""Clipping by the norms of earlier steps: where weights move inside of backward, this step's is known only then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Of the step before in the mean of all before it.
SHARE_OF_LAST = 0.1


class EarlierNorms:
    """A running mean of gradient norms; use one per run, the same on every rank."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def factor(self, clip_norm: float | None) -> float:
        """What the gradients of the next step are multiplied with: as if its norm were the mean of those before; the
        first is not clipped."""
        if clip_norm is None or self._mean is None or self._mean <= clip_norm:
            return 1.0
        return clip_norm / self._mean

    def add(self, norm: float) -> None:
        """Of a step that was done."""
        if math.isfinite(norm):
            self._mean = norm if self._mean is None else self._mean + SHARE_OF_LAST * (norm - self._mean)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"mean": self._mean}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Of a checkpoint; an older one has nothing."""
        self._mean = state.get("mean")
