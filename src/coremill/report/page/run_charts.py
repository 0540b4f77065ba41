"""What the page of a run draws: curves over steps with their marks, memory against its limit, where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from coremill.report import terminal
from coremill.report.page.charts import Curve, Mark, Part, Reference, level_bar, line_chart, stacked_bar
from coremill.report.plan_screen import MEMORY_PARTS, PHASE_NAMES
from coremill.report.summary_screen import SPLIT_STYLES

LIMIT_IN_SIGHT = 6  # times the use: a limit further away would flatten the bars, and is a mark at their end
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


def curves(summary: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """The charts with their headings."""
    marks = [Mark(one["kind"], one["step"], f"step {one['step']:,}: {one['text']}") for one in summary["marks"]]
    return [
        ("Loss", _loss_chart(summary, marks)),
        ("Learning rate", _plain_chart(summary, marks, "learning_rate", is_noisy=False)),
        ("Gradient norm", _plain_chart(summary, marks, "gradient_norm")),
        ("Tokens per second", _throughput_chart(summary, marks)),
    ]


def short_number(value: float) -> str:
    """3e-4, 0.05, 1.25: three figures."""
    if 0 < abs(value) < 1e-3:
        figures, _, power = f"{value:.2e}".partition("e")
        return f"{figures.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.3g}".replace("e+0", "e")


def _loss_chart(summary: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    series = summary["series"]
    points = [(one["step"], one["loss"]) for one in summary["evaluations"] if one["loss"] is not None]
    first, last = terminal.format_loss(summary["loss_first"]), terminal.format_loss(summary["loss_last"])
    return line_chart(
        title="Training loss by step",
        description=f"From {first} to {last} in {summary['steps']} steps.",
        curves=[Curve("training loss", series["step"], series["loss"], dots=points)],
        show=terminal.format_loss,
        marks=marks,
    )


def _plain_chart(summary: Mapping[str, Any], marks: Sequence[Mark], key: str, *, is_noisy: bool = True) -> Markup:
    name = key.replace("_", " ")
    values = [value for value in summary["series"][key] if value is not None]
    spread = f"Between {short_number(min(values))} and {short_number(max(values))}." if values else ""
    return line_chart(
        title=f"{name.capitalize()} by step",
        description=spread,
        curves=[Curve(name, summary["series"]["step"], summary["series"][key], is_noisy=is_noisy)],
        show=short_number,
        marks=marks,
        from_zero=True,
    )


def _throughput_chart(summary: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    series, planned, mean = summary["series"], summary["plan"]["tokens_per_second"], summary["tokens_per_second"]
    references = [Reference(f"planned, {terminal.format_rate(planned, '')}", planned)] if planned else []
    return line_chart(
        title="Tokens per second by step",
        description=f"{terminal.format_rate(mean)} from step 2 to the end.",
        curves=[Curve("tokens per second", series["step"], series["tokens_per_second"])],
        show=terminal.format_rate,
        references=references,
        marks=marks,
        from_zero=True,
    )


def memory_scale(summary: Mapping[str, Any]) -> tuple[float, float | None]:
    """Full width of the memory bars, and the limit; one far above all use lies beyond their end."""
    plan, measured = summary["plan"], summary["measured"]
    limit = plan["memory_limit_bytes_per_rank"]
    used = max([plan["memory_bytes_per_rank"] or 0, measured["memory_bytes_per_rank"] or 0, 1])
    return (max(limit, used) * 1.02 if limit and limit <= LIMIT_IN_SIGHT * used else used * 1.25), limit


def memory_phases(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Plan beside measured for each phase."""
    whole, limit = memory_scale(summary)
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


def memory_ranks(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The peak of each rank."""
    whole, limit = memory_scale(summary)
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


def memory_parts(summary: Mapping[str, Any]) -> dict[str, Any] | None:
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


def step_split(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
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


def wall_split(summary: Mapping[str, Any]) -> dict[str, Any] | None:
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
