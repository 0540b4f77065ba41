"""What happened to a run between its steps, for the axis of a chart: saves, stops, new beginnings, failures.

Every rank tells of its own end, and a restart is told by whoever saw it: what is one moment becomes one mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coremill.report.events import Event
from coremill.report.state import STOPPED_CODES
from coremill.report.tally import RunTally
from coremill.report.timeline import SAME_FAULT_SECONDS, outcome_of

MOST_SAVES = 60  # on an axis; more would be a hatching


def marks_of(tally: RunTally, faults: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """In order of time: `kind` (save, stop, failure, restart, continuation), `step`, `time`, `text`."""
    ends = [(event, step) for event, step in tally.moments if event.kind == "error"]
    stops = [(event, step) for event, step in ends if is_stop(event)]
    told = [_mark("stop", event.time, step, "stopped on request") for event, step in stops]
    restarts = [
        _mark("restart" if fault["action"] == "restart" else "failure", fault["time"], fault["step"], _words(fault))
        for fault in faults
    ]
    failures = [
        _mark("failure", event.time, step, _first_line(event.get("message")))
        for event, step in ends
        if not is_stop(event) and not any(_is_near(event.time, one["time"]) for one in restarts)
    ]
    return sorted(
        [*_once(told), *restarts, *_once(failures)[-1:], *_continuations(tally, restarts), *_saves(tally)],
        key=lambda mark: float(mark["time"]),
    )


def is_stop(event: Event) -> bool:
    """An end that somebody asked for."""
    return int(event.number("exit_code")) in STOPPED_CODES or bool(event.get("on_request"))


def _mark(kind: str, time: float, step: int | None, text: str) -> dict[str, Any]:
    return {"kind": kind, "step": int(step or 0), "time": time, "text": text}


def _words(fault: dict[str, Any]) -> str:
    return f"{fault['text']}: {outcome_of(fault)}"


def _first_line(text: Any) -> str:
    return (str(text or "").splitlines() or ["failed"])[0]


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) < SAME_FAULT_SECONDS


def _once(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All ranks tell of the same end: the first by time stands for it."""
    kept: list[dict[str, Any]] = []
    for mark in sorted(marks, key=lambda mark: float(mark["time"])):
        if not kept or not _is_near(mark["time"], kept[-1]["time"]):
            kept.append(mark)
    return kept


def _continuations(tally: RunTally, restarts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank 0 goes on from a checkpoint; not where the launcher has started it again after a fault."""
    resumes = sorted((event for event, _ in tally.moments if event.kind == "resume" and event.rank == 0), key=_time)
    marks, before = [], float("-inf")
    for event in resumes:
        after_fault = any(one["kind"] == "restart" and before < one["time"] < event.time for one in restarts)
        if not after_fault and event.number("step") > 0:
            step = int(event.number("step"))
            marks.append(_mark("continuation", event.time, step, "continued from here"))
        before = event.time
    return marks


def _saves(tally: RunTally) -> list[dict[str, Any]]:
    """By the word of rank 0; of very many every so many."""
    saves = [event for event, _ in tally.moments if event.kind == "save" and event.rank == 0 and event.get("saved")]
    every = -(-len(saves) // MOST_SAVES) or 1
    return [_mark("save", event.time, int(event.number("step")), "saved") for event in saves[::-1][::every]]


def _time(event: Event) -> float:
    return event.time
