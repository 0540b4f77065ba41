"""The page of several runs: their curves in one chart, over steps, tokens or time, and what the tables say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from coremill.report import terminal
from coremill.report.comparison import compare, difference_rows, figures, plan_figures, verdicts
from coremill.report.page.charts import STEPS, Axis, Curve, line_chart
from coremill.report.page.document import render_document
from coremill.report.page.run_charts import short_number

TEMPLATE = "comparison.html.jinja"
COLORS = 8
AXES = {  # key of the series: what the switch calls it, and how its places are said
    "step": ("steps", STEPS),
    "tokens": (
        "tokens",
        Axis(show=lambda tokens: f"{terminal.format_count(tokens)} tokens", tick=terminal.format_count),
    ),
    "elapsed_seconds": ("time", Axis(show=terminal.format_seconds, tick=terminal.format_seconds)),
}


def render_comparison_page(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The whole page as text."""
    document = compare(summaries)
    names = [run["name"] for run in document["runs"]]
    return render_document(
        TEMPLATE,
        {
            "title": f"{', '.join(names)}: coremill runs",
            "names": names,
            "subjects": [run["subject"] for run in document["runs"]],
            "panels": [(key, label, _charts(summaries, names, key)) for key, (label, _) in AXES.items()],
            "figures": [figures(run) for run in document["runs"]],
            "states": [run["state"] for run in document["runs"]],
            "plans": [plan_figures(run) for run in document["runs"]],
            "differences": difference_rows(document),
            "verdicts": verdicts(document),
            "colors": COLORS,
        },
    )


def _charts(summaries: Sequence[Mapping[str, Any]], names: Sequence[str], along: str) -> list[tuple[str, Markup]]:
    label, axis = AXES[along]

    def chart(heading: str, key: str, show: Any, *, from_zero: bool, with_evaluations: bool = False) -> Markup:
        curves = [
            Curve(
                name,
                summary["series"][along],
                summary["series"][key],
                color=index % COLORS,
                dots=_evaluations(summary, along) if with_evaluations else (),
                dots_name=f"{name}, evaluation",
                is_noisy=key != "learning_rate",
            )
            for index, (name, summary) in enumerate(zip(names, summaries, strict=True))
        ]
        return line_chart(
            title=f"{heading} by {label}",
            description=", ".join(names),
            curves=curves,
            show=show,
            axis=axis,
            from_zero=from_zero,
            group=along,
        )

    return [
        ("Loss", chart("Loss", "loss", terminal.format_loss, from_zero=False, with_evaluations=True)),
        ("Learning rate", chart("Learning rate", "learning_rate", short_number, from_zero=True)),
        ("Gradient norm", chart("Gradient norm", "gradient_norm", short_number, from_zero=True)),
        ("Tokens per second", chart("Tokens per second", "tokens_per_second", terminal.format_rate, from_zero=True)),
    ]


def _evaluations(summary: Mapping[str, Any], along: str) -> list[tuple[float, float]]:
    """Evaluations on this axis: after which step they were is known, the rest is read off the curve."""
    steps, places = summary["series"]["step"], summary["series"][along]
    found = []
    for one in summary["evaluations"]:
        at = next((index for index, step in enumerate(steps) if step >= one["step"]), None)
        if at is not None and one["loss"] is not None:
            found.append((one["step"] if along == "step" else places[at], one["loss"]))
    return found
