"""The report page: one HTML file that opens offline, drawn from the summary alone.

The page loads nothing: style, script and charts are inside, and its content policy forbids the rest. Escaping is on.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from coremill.files import write_whole
from coremill.report import terminal
from coremill.report.charts import Dots, Part, Reference, level_bar, line_chart, stacked_bar
from coremill.report.metrics import format_metric, in_words, metric_names, model_class_of
from coremill.report.plan_screen import MEMORY_PARTS, PHASE_NAMES
from coremill.report.readers.base import Reader
from coremill.report.summary_screen import SPLIT_STYLES, collective_rows
from coremill.report.timeline import outcome_of

if TYPE_CHECKING:
    from jinja2 import Environment, Template

TEMPLATE = "page.html.jinja"
READOUT_SCRIPT = """
for (const plot of document.querySelectorAll("[data-readout]")) {
  const data = JSON.parse(plot.dataset.readout);
  const make = (name) => plot.appendChild(Object.assign(document.createElement("i"), {className: name, hidden: true}));
  const line = make("cursor"), dot = make("cursor-dot"), label = make("readout");
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const at = 100 * (event.clientX - box.left) / box.width;
    let near = 0;
    data.x.forEach((x, index) => { if (Math.abs(x - at) < Math.abs(data.x[near] - at)) near = index; });
    for (const part of [line, dot, label]) { part.hidden = false; part.style.left = data.x[near] + "%"; }
    dot.style.top = data.y[near] + "%";
    label.textContent = data.text[near];
    label.classList.toggle("flip", data.x[near] > 60);
  });
  plot.addEventListener("pointerleave", () => { for (const part of [line, dot, label]) part.hidden = true; });
}
"""
_WALL_PARTS = {
    "join": ("starting ranks", "m-8"),
    "data": ("opening data", "m-7"),
    "build": ("building the model", "m-5"),
    "load": ("reading weights", "m-3"),
    "steps": ("steps", "m-1"),
    "evaluation": ("evaluation", "m-4"),
    "export": ("export", "m-6"),
    "sample": ("sample", "m-2"),
    "other": ("other", "m-9"),
}
_MEMORY_CLASSES = {
    "parameters": "m-1",
    "gradients": "m-2",
    "optimizer": "m-3",
    "activations": "m-4",
    "logits": "m-5",
    "buffers": "m-6",
    "data": "m-7",
    "base": "m-8",
    "slack": "m-9",
}


def render_page(summary: Mapping[str, Any]) -> str:
    """The whole page as text."""
    digest = base64.b64encode(hashlib.sha256(READOUT_SCRIPT.encode()).digest()).decode()
    return _template().render(
        summary=summary,
        metrics=metric_names(summary["evaluations"][-1]) if summary["evaluations"] else [],
        model_class=model_class_of(summary),
        name=PurePath(summary["run"]).name or summary["run"],
        script=Markup(READOUT_SCRIPT),
        script_digest=digest,
        tiles=_tiles(summary),
        loss_chart=_loss_chart(summary),
        throughput_chart=_throughput_chart(summary),
        memory_phases=_memory_phases(summary),
        memory_parts=_memory_parts(summary),
        memory_ranks=_memory_ranks(summary),
        step_split=_step_split(summary),
        exchanges=collective_rows(summary),
        wall_split=_wall_split(summary),
        comparison=_comparison(summary),
        environment=_environment(summary),
        faults=[{**fault, "outcome": outcome_of(fault)} for fault in summary.get("faults") or ()],
    )


class PageReader(Reader):
    """Writes report.html, whole or not at all."""

    def __init__(self, run_folder: Path) -> None:
        self._file = run_folder / "report.html"

    def end(self, summary: Mapping[str, Any]) -> None:
        write_whole(self._file, render_page(summary))


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # 60 ms that a progress bar need not pay

    environment: Environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": terminal.format_bytes,
        "seconds": terminal.format_seconds,
        "percent": terminal.format_percent,
        "rate": terminal.format_rate,
        "count": terminal.format_count,
        "loss": terminal.format_loss,
        "metric": format_metric,
        "in_words": in_words,
        "value": show_value,
        "cpus": show_cpus,
    }
    return environment.get_template(TEMPLATE)


def show_value(value: Any) -> str:
    """A chosen value in words."""
    return "yes" if value is True else "no" if value is False else str(value)


def show_cpus(cpus: Any) -> str:
    """Hardware threads as ranges: 0-3, 8."""
    if not isinstance(cpus, list) or not all(isinstance(cpu, int) for cpu in cpus):
        return terminal.NONE if cpus is None else str(cpus)
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges) or terminal.NONE


def _tiles(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Headline figures: label, figure, and what to hold it against where there is something."""

    def against(value: float | None, text: str) -> str:
        return text if value is not None else ""

    peak, limit = summary["measured"]["memory_bytes_per_rank"], summary["plan"]["memory_limit_bytes_per_rank"]
    planned, rate = summary["plan"]["tokens_per_second"], summary["matmul_flops_per_second"]
    first, goodput, padding = (summary[key] for key in ("loss_first", "goodput", "padding_fraction"))
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
        (
            "Wall time",
            terminal.format_seconds(summary["seconds"]),
            against(goodput, f"{terminal.format_percent(goodput)} in steps"),
        ),
    ]
    last = summary["evaluations"][-1] if summary["evaluations"] else {}
    for name in metric_names(last)[:1]:
        figure = format_metric(last[name])
        return [*tiles, (in_words(name).capitalize(), figure, f"evaluated at step {last['step']:,}")]
    tokens = terminal.format_count(summary["tokens"])
    return [*tiles, ("Tokens", tokens, against(padding, f"{terminal.format_percent(padding)} padding"))]


def _loss_chart(summary: Mapping[str, Any]) -> Markup:
    series = summary["series"]
    points = [(one["step"], one["loss"]) for one in summary["evaluations"] if one["loss"] is not None]
    return line_chart(
        name="training loss",
        title="Training loss by step",
        description=f"From {terminal.format_loss(summary['loss_first'])}"
        f" to {terminal.format_loss(summary['loss_last'])} in {summary['steps']} steps.",
        x=series["step"],
        y=series["loss"],
        show=terminal.format_loss,
        dots=Dots("evaluation", points) if points else None,
    )


def _throughput_chart(summary: Mapping[str, Any]) -> Markup:
    series, planned, mean = summary["series"], summary["plan"]["tokens_per_second"], summary["tokens_per_second"]
    references = [Reference(f"planned, {terminal.format_rate(planned, '')}", planned)] if planned else []
    return line_chart(
        name="tokens per second",
        title="Tokens per second by step",
        description=f"{terminal.format_rate(mean)} from step 2 to the end.",
        x=series["step"],
        y=series["tokens_per_second"],
        show=lambda value: terminal.format_rate(value),
        references=references,
        from_zero=True,
    )


def _memory_scale(summary: Mapping[str, Any]) -> tuple[float, float | None]:
    """Full width of the memory bars, and the limit; one far above all use would flatten the bars and is left off."""
    plan, measured = summary["plan"], summary["measured"]
    limit = plan["memory_limit_bytes_per_rank"]
    used = max([plan["memory_bytes_per_rank"] or 0, measured["memory_bytes_per_rank"] or 0, 1])
    return (max(limit, used) * 1.02, limit) if limit and limit <= 4 * used else (used * 1.1, None)


def _memory_phases(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Plan beside measured for each phase."""
    whole, limit = _memory_scale(summary)
    rows = []
    for phase, label in PHASE_NAMES.items():
        planned = summary["plan"]["memory_bytes_by_phase"].get(phase)
        measured = summary["measured"]["memory_bytes_by_phase"].get(phase)
        if planned is None and measured is None:
            continue
        rows.append(
            {
                "label": label,
                "difference": terminal.format_difference(measured, planned),
                "bars": [_memory_bar(planned, whole, limit, "plan"), _memory_bar(measured, whole, limit, "measured")],
            }
        )
    return rows


def _memory_ranks(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The peak of each rank."""
    whole, limit = _memory_scale(summary)
    return [
        {"label": f"rank {rank}", "bars": [_memory_bar(peak, whole, limit, "measured")]}
        for rank, peak in enumerate(summary["peak_rss_bytes_per_rank"])
    ]


def _memory_bar(size: float | None, whole: float, limit: float | None, kind: str) -> dict[str, Any]:
    text = terminal.format_bytes(size)
    over = limit is not None and (size or 0) > limit
    described = f"{kind} {text}" + (f" of {terminal.format_bytes(limit)}" if limit else "")
    css_class = "over" if over else kind
    return {
        "kind": kind,
        "text": text,
        "bar": level_bar(size or 0.0, whole, css_class, description=described, limit=limit),
    }


def _memory_parts(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The planned peak, part by part."""
    sizes = summary["plan"]["memory_parts_bytes"]
    parts = [
        Part(label, sizes[name], terminal.format_bytes(sizes[name]), _MEMORY_CLASSES[name])
        for name, label in MEMORY_PARTS.items()
        if sizes.get(name)
    ]
    if not parts:
        return None
    words = ", ".join(f"{part.name} {part.label}" for part in parts)
    return {"parts": parts, "bar": stacked_bar(parts, description=f"Planned peak memory: {words}")}


def _step_split(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where a step goes: planned and measured, on one scale."""
    planned, measured = dict(summary["plan"]["step_seconds"]), summary["measured"]["step_seconds"]
    if planned:  # what compute hides takes no time of its own
        planned["communication"] = planned.get("exposed_communication", planned.get("communication"))
    whole = max(planned.get("total") or 0.0, measured.get("total") or 0.0)
    rows = []
    for label, split in (("plan", planned), ("measured", measured)):
        parts = [
            Part(name, split[name], terminal.format_seconds(split[name]), f"c-{name}")
            for name in SPLIT_STYLES
            if split.get(name)
        ]
        if parts:
            total = terminal.format_seconds(split.get("total"))
            words = f"{label} {total}: " + ", ".join(f"{part.name} {part.label}" for part in parts)
            rows.append(
                {"label": label, "total": total, "parts": parts, "bar": stacked_bar(parts, whole, description=words)}
            )
    return rows


def _wall_split(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where the whole run went."""
    seconds = summary["wall_seconds_split"]
    parts = [
        Part(label, seconds[name], terminal.format_seconds(seconds[name]), css_class)
        for name, (label, css_class) in _WALL_PARTS.items()
        if seconds.get(name, 0.0) >= 0.001
    ]
    if not parts:
        return None
    words = ", ".join(f"{part.name} {part.label}" for part in parts)
    return {"parts": parts, "bar": stacked_bar(parts, description=f"Wall time: {words}")}


def _comparison(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Plan beside measured."""
    plan, measured = summary["plan"], summary["measured"]
    pairs = (
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
            "On the wire per step and rank",
            plan["wire_bytes_per_step_per_rank"],
            measured["wire_bytes_per_step_per_rank"],
            terminal.format_bytes,
        ),
    )
    return [(label, show(a), show(b), terminal.format_difference(b, a)) for label, a, b, show in pairs]


def _environment(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    environment = summary["environment"]
    started = environment.get("started")
    hosts = environment.get("hosts") or []
    rows = [
        ("Fleet", environment.get("fleet")),
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
