"""What happens when a number is not finite: the step is judged before the optimizer sees it, on every rank alike.

A loss or a gradient that is not finite is known to all ranks from the exchange a step makes anyway. Only then do they
exchange more: which rank, which rows of the packed data. The weights stay as they were; `stop` ends the run, `skip`
leaves the step out, at most `skip_budget` times in the run. What was left out is part of every checkpoint, so a run
that goes on has the same budget left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from coremill.config.schema import NumericsSection
from coremill.data.loader import FILLER, AnyBatch
from coremill.engines.base import StepTotals
from coremill.errors import NonFinite
from coremill.world.group import World

SHOWN_ROWS = 8  # of one rank, in words; the event has all


class EventSink(Protocol):
    """Where a rank says what it finds and does (report/events.py)."""

    def write(self, kind: str, /, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Culprit:
    """What one rank found in its own rows."""

    rank: int
    what: str  # "the loss is nan", "the gradient is not finite"
    rows: list[int]  # of the packed data

    def __str__(self) -> str:
        shown = ", ".join(str(row) for row in self.rows[:SHOWN_ROWS])
        more = f" and {len(self.rows) - SHOWN_ROWS} more" if len(self.rows) > SHOWN_ROWS else ""
        return f"{self.what} on rank {self.rank} in row{'s' if len(self.rows) != 1 else ''} {shown}{more}"


def bad_rows(batches: Sequence[AnyBatch], is_bad: Sequence[bool]) -> list[int]:
    """Rows of the micro-batches that are bad, fillers left out."""
    return [row for batch, bad in zip(batches, is_bad, strict=True) if bad for row in batch.row_ids if row != FILLER]


class NumericsGuard:
    """Decides about steps and evaluations whose numbers are not finite; use one per run, on every rank."""

    def __init__(self, settings: NumericsSection, world: World, events: EventSink) -> None:
        self._settings, self._world, self._events = settings, world, events
        self.skipped_steps: list[int] = []

    def state(self) -> dict[str, Any]:
        """For a checkpoint; the same on every rank."""
        return {"skipped_steps": list(self.skipped_steps)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what was left out before."""
        self.skipped_steps = [int(step) for step in state.get("skipped_steps", ())]

    def judge_step(
        self,
        step: int,
        totals: StepTotals,
        batches: Sequence[AnyBatch],
        losses: Sequence[float],
        gradients_finite: Callable[[Any], bool],
    ) -> None:
        """Every rank calls it for a step that is not finite; returns where the step is to be left out, else raises.

        `gradients_finite` runs one micro-batch again, on all ranks together; it is asked only where every loss is
        finite, for the sums alone do not say whose gradient was not.
        """
        what = next((f"the loss is {loss}" for loss in losses if not math.isfinite(loss)), "")
        culprits = self._gathered(what, bad_rows(batches, [not math.isfinite(loss) for loss in losses]))
        if not culprits:
            finite = [gradients_finite(batch) for batch in batches]
            what = "" if all(finite) else "the gradient is not finite"
            culprits = self._gathered(what, bad_rows(batches, [not each for each in finite]))
        found = "; ".join(str(culprit) for culprit in culprits) or (
            f"the loss is {totals.loss}, the gradient norm {totals.gradient_norm}, though each rank's own are finite"
        )
        text = f"step {step}: {found}"
        budget = self._settings.skip_budget if self._settings.on_non_finite == "skip" else 0
        skip = len(self.skipped_steps) < budget
        if skip:
            self.skipped_steps.append(step)
        self.tell(text, step, culprits, skipped=skip)
        if skip:
            return
        spent = self._settings.on_non_finite == "skip"
        raise NonFinite(
            text,
            where="numerics.skip_budget" if spent else None,
            why=f"the budget of {budget} skipped steps is spent (steps {', '.join(map(str, self.skipped_steps))})"
            if spent and budget
            else "the weights were left as they were before this step",
            do="lower train.learning_rate, set train.clip_norm, look at these rows, or go on without such steps: "
            "--set numerics.on_non_finite=skip --set numerics.skip_budget=10"
            if not spent
            else "lower train.learning_rate, look at these rows, or raise numerics.skip_budget",
        )

    def judge_evaluation(self, step: int, loss: float, rows: list[int]) -> None:
        """A finite loss passes; another ends the run or, with `skip`, is only told: an evaluation changes nothing.

        `rows` are those of this rank whose loss was not finite. All ranks see the same `loss`.
        """
        if math.isfinite(loss):
            return
        culprits = self._gathered("the loss is not finite" if rows else "", rows)
        found = "; ".join(str(culprit) for culprit in culprits) or f"the loss is {loss}"
        text = f"evaluation after step {step}: {found}"
        self.tell(text, step, culprits, skipped=self._settings.on_non_finite == "skip")
        if self._settings.on_non_finite == "stop":
            raise NonFinite(
                text,
                why="the training loss of this step was finite: the rows, or weights that have grown too large",
                do="look at these rows; --set numerics.on_non_finite=skip trains on and only tells it",
            )

    def _gathered(self, what: str, rows: list[int]) -> list[Culprit]:
        told = self._world.gather({"what": what, "rows": rows})
        return [Culprit(rank, each["what"], each["rows"]) for rank, each in enumerate(told) if each["what"]]

    def tell(self, text: str, step: int, culprits: Sequence[Culprit] = (), *, skipped: bool = False) -> None:
        self._events.write(
            "non_finite",
            step=step,
            text=text,
            skipped=skipped,
            skipped_so_far=len(self.skipped_steps),
            budget=self._settings.skip_budget,
            culprits=[asdict(culprit) for culprit in culprits],
        )


def moved_inside(step: int, totals: StepTotals, guard: NumericsGuard | None) -> NonFinite:
    """The end of a run whose weights had moved by this step's gradients when one of these was not finite."""
    text = f"step {step}: the loss is {totals.loss:.4g}, but a gradient is not finite"
    if guard is not None:
        guard.tell(text, step)
    return NonFinite(
        text,
        where="train.update",
        why="inside of backward, weights above it had been moved by then, so this step cannot be left out; what was"
        " saved before it stands",
        do="the same command goes on from the newest checkpoint; set train.update=after, which names rank and rows and"
        " can leave such steps out, or lower train.learning_rate",
    )
