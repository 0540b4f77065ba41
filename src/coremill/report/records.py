"""What a tally keeps: one step, and a running mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One global step, by the clock of the rank that told it."""

    rank: int
    time: float
    loss: float | None
    learning_rate: float
    gradient_norm: float | None
    tokens: float  # real ones, of all ranks
    padding_tokens: float
    seconds: float
    warming_up: bool  # the first step of an attempt
    skipped: bool = False  # its numbers were none


@dataclass(slots=True)
class Mean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Take one more value in."""
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        """None where nothing came in."""
        return self.total / self.count if self.count else None
