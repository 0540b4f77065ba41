"""The numbers and notes that a tracker gets, made from events through the tally that screen and report use.

Names are those that dashboards made for the HF Trainer know (train/loss, train/grad_norm, eval/loss), with units where
there are any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from coremill.report.events import Event
from coremill.report.metrics import metric_names
from coremill.report.readers.base import KEPT
from coremill.report.readers.trackers.base import Point
from coremill.report.tally import RunTally

RATES_KEPT = 10_000  # steps: more are not done again unless `--from` says so
NOTE_CHARACTERS = 4000  # MLflow takes 8000 bytes; the oldest notes are let go


@dataclass
class NumbersOfRun:
    """Follows the events; what is global is told by rank 0."""

    tally: RunTally
    notes: list[str] = field(default_factory=list)
    _rates: dict[int, float] = field(default_factory=dict)  # learning rates of the newest steps
    _goes_back_to: int | None = None  # said by `train --from`, of the next point

    @staticmethod
    def of_plan(plan: dict[str, object]) -> NumbersOfRun:
        """For a run that lives as long as it likes: the tally keeps what rates need."""
        return NumbersOfRun(RunTally(plan, keep=KEPT))

    def take(self, event: Event) -> Point | None:
        """Count the event in; the numbers that it brings, if any."""
        self.tally.add(event)
        if (line := note_of(event)) is not None:
            self.notes.append(line)
            while sum(map(len, self.notes)) > NOTE_CHARACTERS:
                del self.notes[0]
        if event.rank != 0:
            return None
        if event.kind == "set_aside":
            after = int(event.number("after_step"))
            self._goes_back_to = after if self._goes_back_to is None else min(after, self._goes_back_to)
        if event.kind == "step":
            return self._marked(self._step(event))
        if event.kind == "evaluation":
            names = ("loss", *metric_names(event.fields))
            return self._marked(_point(event, {f"eval/{name}": event.get(name) for name in names}))
        return None

    def _marked(self, point: Point) -> Point:
        """Say where the run has gone another way: by `--from`, or a step done again at another learning rate.

        Steps that are only repeated after a restart have the same rates, at any number of ranks.
        """
        back_to, self._goes_back_to = self._goes_back_to, None
        rate = point.numbers.get("train/learning_rate")
        if rate is not None:
            known = self._rates.get(point.step)
            if back_to is None and known is not None and not math.isclose(known, rate, rel_tol=1e-9):
                back_to = point.step - 1
            if back_to is not None:
                self._rates = {step: each for step, each in self._rates.items() if step <= back_to}
            self._rates[point.step] = rate
            self._rates.pop(point.step - RATES_KEPT, None)
        return replace(point, goes_back_to=back_to)

    def _step(self, event: Event) -> Point:
        record = self.tally.steps.get(int(event.number("step")))
        # Of this step, which may be one that is done again; none of the first of an attempt, which allocates.
        rate = None if record is None or record.warming_up or not record.seconds else record.tokens / record.seconds
        numbers = {
            "train/loss": event.get("loss"),
            "train/learning_rate": event.get("learning_rate"),
            "train/grad_norm": event.get("gradient_norm"),
            "train/step_seconds": event.get("seconds"),
            "train/tokens_per_second": rate,
            "train/utilization": self.tally.utilization(rate),
            "train/memory_bytes_per_rank": max(rank.rss_bytes for rank in self.tally.current_ranks),
        }
        return _point(event, numbers)


def _point(event: Event, numbers: dict[str, object]) -> Point:
    known = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
    return Point(int(event.number("step")), event.time, known)


def note_of(event: Event) -> str | None:
    """What happened besides steps, as a line; None where it is nothing to note."""
    step = int(event.number("step"))
    if event.kind == "fault":
        return f"after step {step}: {event.get('text')} ({event.get('action')})"
    if event.kind == "restart":
        again = (
            f"{event.get('cause')}, {event.number('resumed_seconds'):.1f} s, {event.get('steps_lost')} steps repeated"
        )
        return f"started again from step {event.get('from_step')}: {again}"
    if event.kind == "error":
        return f"ended: {str(event.get('message')).splitlines()[0]}"
    if event.rank != 0:
        return None
    if event.kind == "save":
        return f"step {step} saved" if event.get("saved") else f"step {step} was not saved: {event.get('reason')}"
    if event.kind == "set_aside":
        return f"gone back to step {event.get('after_step')}: later ones are set aside"
    if event.kind in ("resume", "passed_over", "notice", "non_finite"):
        return str(event.get("text"))
    return f"exported to {event.get('folder')}" if event.kind == "export" else None
