"""What a tally keeps: one step, a running mean, and from when on what came after a step counts no more."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.report.events import Event


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


@dataclass(frozen=True, slots=True)
class SetAside:
    """`train --from` went back to a step: what had been done after it."""

    time: float
    after_step: int

    @staticmethod
    def by(event: Event) -> SetAside:
        """The event `set_aside`."""
        return SetAside(event.time, int(event.number("after_step")))

    def covers(self, event: Event) -> bool:
        """Whether an event tells of a step that was set aside."""
        is_of_a_step = event.kind in ("step", "evaluation", "non_finite", "save")
        return is_of_a_step and event.time < self.time and event.number("step") > self.after_step
