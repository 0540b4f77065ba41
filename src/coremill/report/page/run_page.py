"""The page of one run, drawn from its summary alone: a file that opens offline, or the first state of a live page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from coremill.report import terminal
from coremill.report.metrics import (
    format_metric,
    in_words,
    loading_lines,
    memory_beside_plan,
    metric_names,
    model_class_of,
    pages_of_libraries,
)
from coremill.report.page import run_charts
from coremill.report.page.document import render_blocks, render_document
from coremill.report.sources import kind_of_documents
from coremill.report.summary_screen import collective_rows, cost_words, parts_line
from coremill.report.timeline import outcome_of

TEMPLATE = "run.html.jinja"
MARKS = ("save", "stop", "continuation", "restart", "failure")
# What a live page replaces where it changed; a part that stays the same keeps its selection and what is unfolded.
PARTS = (
    *("heading", "notes", "tiles", "curves", "resources", "plan", "sources", "ranks", "faults", "evaluations"),
    "results",
)


def render_page(summary: Mapping[str, Any], *, live: str | None = None) -> str:
    """The whole page as text; `live`: the version it shows, of a page that goes on by its stream."""
    return render_document(TEMPLATE, _values(summary), live=live)


def render_parts(summary: Mapping[str, Any]) -> dict[str, str]:
    """The parts of the page by name, and its title as plain text."""
    values = _values(summary)
    return {"title": str(values["title"]), **render_blocks(TEMPLATE, PARTS, values)}


def _values(summary: Mapping[str, Any]) -> dict[str, Any]:
    name = PurePath(summary["run"]).name or summary["run"]
    return {
        "summary": summary,
        "title": f"{_progress(summary)}{name}: coremill run",
        "name": name,
        "subject": _subject(summary),
        "metrics": metric_names(summary["evaluations"][-1]) if summary["evaluations"] else [],
        "loading": _loading(summary),
        "tiles": _tiles(summary),
        "charts": run_charts.curves(summary),
        "kinds_of_marks": [kind for kind in MARKS if any(mark["kind"] == kind for mark in summary["marks"])],
        "memory_phases": run_charts.memory_phases(summary),
        "memory_parts": run_charts.memory_parts(summary),
        "memory_ranks": run_charts.memory_ranks(summary),
        "limit_beyond": _limit_beyond(summary),
        "step_split": run_charts.step_split(summary),
        "parts_line": parts_line(summary),
        "exchanges": collective_rows(summary),
        "wall_split": run_charts.wall_split(summary),
        "comparison": _comparison(summary),
        "environment": _environment(summary),
        "best_step": (summary.get("best") or {}).get("step"),
        "documents": kind_of_documents(summary["data"] or {}),
        "sources": [_source(source) for source in summary.get("sources") or ()],
        "faults": [{**fault, "outcome": outcome_of(fault)} for fault in summary.get("faults") or ()],
    }


def _loading(summary: Mapping[str, Any]) -> str:
    """The Python that loads what was exported."""
    export = summary.get("export") or {}
    base = export.get("base") if export.get("form") == "adapter" else None
    return "\n".join(filter(None, loading_lines(model_class_of(summary), str(export.get("folder")), base)))


def _progress(summary: Mapping[str, Any]) -> str:
    """For the title of a tab, while the run goes."""
    planned = summary["steps_planned"]
    return f"{100 * summary['steps'] // planned} % " if summary["state"] == "running" and planned else ""


def _subject(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was trained, on what, how: the first lines of the page."""
    subject, data = summary["subject"], summary["data"] or {}
    parameters, trained = subject["parameters"], subject["trainable_parameters"]
    size = f"{terminal.format_count(parameters)} parameters" if parameters else ""
    part = f", {terminal.format_count(trained)} of them trained" if trained and trained != parameters else ""
    if trained and (rank := subject.get("adapter_rank")):
        part = (
            f" that stay as they are, {terminal.format_count(trained)} trained beside them in adapters of rank {rank}"
        )
    drawn = "started from random weights" if subject["weights"] == "random" else ""
    documents = f"{data['documents']:,} {kind_of_documents(data)}" if data.get("documents") else ""
    tokens = f"{terminal.format_count(data['tokens'])} tokens" if data.get("tokens") else ""
    rate, warmup = subject["learning_rate"], subject["warmup_steps"]
    peak = "" if rate is None else run_charts.short_number(rate)
    rising = f"{warmup:,} steps of warm-up" if isinstance(warmup, int) and warmup else ""
    schedule = f"{subject['schedule']} schedule" if rate is not None and subject["schedule"] else ""
    rows = [
        ("Model", [subject["model"], size + part, drawn]),
        ("Data", [", ".join(subject["data"]), documents, tokens]),
        ("Learning rate", [peak, schedule, rising]),
    ]
    return [(label, ", ".join(str(word) for word in words if word)) for label, words in rows if any(words)]


def _source(source: Mapping[str, Any]) -> tuple[str, ...]:
    """One of several that are mixed."""
    counts = (terminal.format_count(source.get(name)) for name in ("documents", "tokens"))
    shares = (terminal.format_percent(source.get(name)) for name in ("share_asked", "share_got"))
    passes = source.get("passes")
    return (str(source["name"]), *counts, *shares, terminal.NONE if passes is None else f"{passes:.2f}")


def _tiles(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Headline figures: label, figure, and what to hold it against where there is something."""

    def against(value: float | None, text: str) -> str:
        return text if value is not None else ""

    peak, limit = summary["measured"]["memory_bytes_per_rank"], summary["plan"]["memory_limit_bytes_per_rank"]
    planned, rate = summary["plan"]["tokens_per_second"], summary["matmul_flops_per_second"]
    first, padding = (summary[key] for key in ("loss_first", "padding_fraction"))
    tiles = [
        ("Loss", terminal.format_loss(summary["loss_last"]), against(first, f"from {terminal.format_loss(first)}")),
        (
            "Tokens per second",
            terminal.format_rate(summary["tokens_per_second"], ""),
            against(planned, f"{terminal.format_rate(planned, '')} planned"),
        ),
        (
            "Utilization",
            terminal.format_percent(summary["utilization"]),
            against(rate, f"of {terminal.format_flops(rate)}"),
        ),
        ("Memory per rank", terminal.format_bytes(peak), against(limit, f"peak, of {terminal.format_bytes(limit)}")),
        ("Time", terminal.format_seconds(summary["seconds"]), _time_against(summary)),
    ]
    last = summary["evaluations"][-1] if summary["evaluations"] else {}
    for name in metric_names(last)[:1]:
        figure = format_metric(last[name])
        return [*tiles, (in_words(name).capitalize(), figure, f"evaluated at step {last['step']:,}")]
    tokens = terminal.format_count(summary["tokens"])
    return [*tiles, ("Tokens", tokens, against(padding, f"{terminal.format_percent(padding)} padding"))]


def _time_against(summary: Mapping[str, Any]) -> str:
    """How long a run that goes will still take at its pace; of another one how much of its time went into steps."""
    planned, pace = summary["steps_planned"], summary["measured"]["step_seconds"]["total"]
    if summary["state"] == "running" and planned and pace:
        return f"about {terminal.format_seconds(pace * max(0, planned - summary['steps']))} left"
    words = [] if summary["goodput"] is None else [f"{terminal.format_percent(summary['goodput'])} in steps"]
    if summary.get("pause_seconds"):
        words.append(f"paused for {terminal.format_seconds(summary['pause_seconds'])}")
    return ", ".join(words)


def _limit_beyond(summary: Mapping[str, Any]) -> bool:
    whole, limit = run_charts.memory_scale(summary)
    return limit is not None and limit > whole


def _comparison(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Plan beside measured."""
    plan, measured = summary["plan"], summary["measured"]
    pairs: tuple[tuple[str, Any, Any, Callable[[Any], str]], ...] = (
        (
            "Peak memory per rank",
            plan["memory_bytes_per_rank"],
            measured["memory_bytes_per_rank"],
            terminal.format_bytes,
        ),
        (
            "Step time",
            plan["step_seconds"].get("total"),
            measured["step_seconds"].get("total"),
            terminal.format_seconds,
        ),
        (
            "Tokens per second",
            plan["tokens_per_second"],
            measured["tokens_per_second"],
            lambda rate: terminal.format_rate(rate, ""),
        ),
        (
            "Sent per step and rank",
            plan["wire_bytes_per_step_per_rank"],
            measured["wire_bytes_per_step_per_rank"],
            terminal.format_bytes,
        ),
    )
    if cost := summary.get("cost"):
        pairs = (*pairs, ("Dollars", cost["planned_usd"], cost["usd"], terminal.format_usd))
    comparable = {"Peak memory per rank": memory_beside_plan(measured)}
    rows = [
        (label, show(planned), show(found), terminal.format_difference(comparable.get(label, found), planned))
        for label, planned, found, show in pairs
    ]
    if (libraries := pages_of_libraries(summary, terminal.format_bytes)) is not None:
        rows.insert(1, libraries)
    return rows


def _environment(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    environment = summary["environment"]
    started = environment.get("started")
    hosts = environment.get("hosts") or []
    rows = [
        ("Fleet", environment.get("fleet")),
        ("Cost", cost_words(cost) if (cost := summary.get("cost")) else None),
        ("Hosts", ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")),
        ("Ranks", environment.get("world_size")),
        ("Threads per rank", environment.get("threads_per_rank")),
        ("Engine", environment.get("engine")),
        ("Arithmetic", environment.get("dtype")),
        ("torch", environment.get("torch_version")),
        ("Started", f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M:%S} UTC" if started else None),
        ("Run folder", summary["run"]),
    ]
    return [(label, str(value)) for label, value in rows if value not in (None, "", 0)]
