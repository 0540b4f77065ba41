"""What went wrong in a run and how it went on: each fault with the restart that followed, in order of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from coremill.report.events import Event
from coremill.report.terminal import format_seconds, print_heading, print_rows

SAME_FAULT_SECONDS = 30.0
MOST_SHOWN = 8  # on a screen; the page shows all


def timeline(faults: Iterable[Event], restarts: Iterable[Event], began: float | None) -> list[dict[str, Any]]:
    """One entry per fault; `resumed_seconds` and `steps_lost` are null where no step was done before the next one."""
    entries: list[dict[str, Any]] = []
    for event in sorted([*faults, *restarts], key=lambda event: event.time):
        if event.kind == "fault":
            names = ("cause", "text", "exit_code", "step", "committed_step", "detected_seconds", "action", "why_not")
            entries.append(
                {
                    "time": event.time,
                    "after_seconds": None if began is None else event.time - began,
                    "rank": event.rank,
                    **{name: event.get(name) for name in names},
                    "resumed_seconds": None,
                    "steps_lost": None,
                }
            )
            continue
        same = next((entry for entry in reversed(entries) if entry["rank"] == event.rank), None)
        if same is not None and same["resumed_seconds"] is None:
            same |= {name: event.get(name) for name in ("resumed_seconds", "steps_lost")}
    return [entry for entry in entries if not _only_followed(entry, entries)]


def _only_followed(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> bool:
    """On several machines each launcher tells what it saw: a lost peer is no fault of its own where one is known."""
    return entry["cause"] == "peer lost" and any(
        other["cause"] != "peer lost" and abs(other["time"] - entry["time"]) < SAME_FAULT_SECONDS for other in entries
    )


def outcome_of(entry: Mapping[str, Any]) -> str:
    """What followed a fault, in words."""
    if entry["resumed_seconds"] is not None:
        lost = entry["steps_lost"]
        steps = "no step" if not lost else "1 step" if lost == 1 else f"{lost} steps"
        return f"training again after {format_seconds(entry['resumed_seconds'])}, {steps} repeated"
    if entry["action"] == "restart":
        return "restarted, no step done before the next fault"
    return f"the end{': ' + str(entry['why_not']) if entry['why_not'] else ''}"


def render_timeline(entries: Sequence[Mapping[str, Any]], console: Console) -> None:
    """The last few faults of a run; nothing where there was none."""
    if not entries:
        return
    title = "1 fault" if len(entries) == 1 else f"{len(entries)} faults"
    print_heading(console, f"Faults and restarts ({title})")
    rows = [(format_seconds(one["after_seconds"]), str(one["text"]), outcome_of(one)) for one in entries[-MOST_SHOWN:]]
    print_rows(console, "fault after", ("after", "what", "then"), rows, wrapped_column=1)
