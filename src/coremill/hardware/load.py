"""Whether other processes keep this machine busy, in the words that doctor, plan and train share."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.hardware.calibrate import BUSY_FRACTION
from coremill.hardware.facts import NodeFacts


@dataclass(frozen=True)
class Busy:
    """Others are at work on the cores that ranks are going to use."""

    message: str
    do: str

    def __str__(self) -> str:
        return f"this machine is busy: {self.message}, so that planned times will not hold ({self.do})"


def busy_with_others(node: NodeFacts) -> Busy | None:
    """None where what others take is not worth a word."""
    if node.busy_fraction <= BUSY_FRACTION:
        return None
    return Busy(
        message=f"other processes keep {100 * node.busy_fraction:.0f} % of the usable cores busy; "
        "a step waits for its slowest thread",
        do="end them, or give coremill fewer cores with taskset",
    )
