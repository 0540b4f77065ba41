"""A report shows the metrics of a run's task under their names, whichever task that is."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from coremill.report.events import EventWriter
from coremill.report.metrics import format_metric, model_class_of
from coremill.report.page.run_page import render_page
from coremill.report.summary import summarise
from coremill.report.summary_screen import render_summary


def a_run(folder: Path) -> Path:
    (folder / "config.yaml").write_text("task: made-up\n")
    with EventWriter(folder, 0) as events:
        events.write("export", folder="export", bytes=1, seconds=1.0)
        for step in (2, 4):
            events.write("evaluation", step=step, exact_match=0.5, f1=81.5, loss=1.0, tokens=8, seconds=0.1)
    return folder


def test_metrics_of_any_task_are_shown_by_name(tmp_path: Path) -> None:
    summary = summarise(a_run(tmp_path))
    assert summary["evaluations"][-1] == {
        "step": 4,
        "loss": 1.0,
        "exact_match": 0.5,
        "f1": 81.5,
        "tokens": 8,
        "seconds": 0.1,
    }
    screen = io.StringIO()
    render_summary(summary, Console(file=screen, width=200))
    lines = [line.split() for line in screen.getvalue().splitlines()]
    assert ["loss", "exact", "match", "f1"] in lines and ["step", "4", "1.0000", "0.5000", "81.50"] in lines
    page = render_page(summary)
    heads = re.findall(r'scope="col">([^<]*)</th>', page[page.index("<h2>Evaluations</h2>") :])
    assert heads[:5] == ["step", "loss", "exact match", "f1", "tokens"]
    assert "Exact match" in page and "erplexity" not in page and "erplexity" not in screen.getvalue()


def test_what_loads_the_export_is_the_tasks_class() -> None:
    assert model_class_of({"config": "model:\n  name: x\ntask: causal-lm\n"}) == "AutoModelForCausalLM"
    assert model_class_of({"config": None}) == "AutoModelForCausalLM"
    assert model_class_of({"config": "task: of-another-package\n"}) == "AutoModel"


def test_how_numbers_look() -> None:
    assert [format_metric(value) for value in (None, 0.5, 1.649, 1234.5, 2e6, float("inf"))] == [
        *("-", "0.5000", "1.65", "1,234.50", "2.00e+06", "inf")
    ]
