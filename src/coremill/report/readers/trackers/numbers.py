"""The numbers and notes that a tracker gets, made from events through the tally that screen and report use.

Names are those that dashboards made for the HF Trainer know (train/loss, train/grad_norm, eval/loss), with units where
there are any.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coremill.report.events import Event
from coremill.report.metrics import metric_names
from coremill.report.readers.base import KEPT
from coremill.report.readers.trackers.base import Point
from coremill.report.tally import RunTally

NOTE_CHARACTERS = 4000  # MLflow takes 8000 bytes; the oldest notes are let go


@dataclass
class NumbersOfRun:
    """Follows the events; what is global is told by rank 0."""

    tally: RunTally
    notes: list[str] = field(default_factory=list)

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
        if event.kind == "step":
            return self._step(event)
        if event.kind == "evaluation":
            names = ("loss", *metric_names(event.fields))
            return _point(event, {f"eval/{name}": event.get(name) for name in names})
        return None

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
    if event.kind in ("resume", "passed_over", "notice", "non_finite"):
        return str(event.get("text"))
    return f"exported to {event.get('folder')}" if event.kind == "export" else None
