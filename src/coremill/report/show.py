"""`coremill report RUN`: the summary of a run on the screen, as JSON, or as a page in a file of the user's choice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.files import write_whole
from coremill.report.readers.page import render_page
from coremill.report.readers.report_json import summary_text
from coremill.report.summary_screen import render_summary


def show_report(summary: Mapping[str, Any], *, as_json: bool, html: Path | None, console: Console) -> None:
    """Show a run, finished or still going; with `as_json` standard output is JSON and nothing else."""
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        write_whole(html, render_page(summary))
    if as_json:
        print(summary_text(summary))
    else:
        render_summary(summary, console)
