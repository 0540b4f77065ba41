"""`coremill report RUN ...`: one run, or several side by side, on the screen, as JSON, as a page, or as a live page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from coremill.errors import InputError
from coremill.files import write_whole
from coremill.redaction import print_for_programs
from coremill.report.comparison import compare, names_of, render_comparison
from coremill.report.page.comparison_page import render_comparison_page
from coremill.report.page.run_page import render_page
from coremill.report.readers.report_json import summary_text
from coremill.report.summary import read_plan, summarise
from coremill.report.summary_screen import render_summary
from coremill.report.terminal import print_line


def show_report(runs: Sequence[Path], *, as_json: bool, html: Path | None, console: Console) -> None:
    """Show runs, finished or still going; with `as_json` standard output is JSON and nothing else."""
    if len(runs) > 1:
        _show_comparison(runs, as_json=as_json, html=html, console=console)
        return
    summary = summarise(runs[0])
    if html is not None:
        _write_page(html, render_page(summary))
    if as_json:
        print_for_programs(summary_text(summary))
    else:
        render_summary(summary, console)


def _show_comparison(runs: Sequence[Path], *, as_json: bool, html: Path | None, console: Console) -> None:
    names_of(runs)  # one named twice is refused before anything is read
    summaries = [summarise(run) for run in runs]
    document = compare(summaries)
    if html is not None:
        _write_page(html, render_comparison_page(summaries))
    if as_json:
        print_for_programs(json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False))
        return
    render_comparison(document, console, html)


def serve_report(
    runs: Sequence[Path], *, serve: bool, port: int | None, as_json: bool, html: Path | None, console: Console
) -> None:
    """A page that follows one run, until Ctrl-C."""
    from coremill.report.page.server import address_of, listen, serve_until_interrupted

    if not serve:
        raise InputError("--port is for the live page", where=f"--port {port}", do="add --serve, or leave it out")
    if len(runs) > 1:
        raise InputError(
            "--serve follows one run",
            where=f"{len(runs)} runs are named",
            do="name one, or write the comparison to a file with --html FILE",
        )
    if as_json or html is not None:
        raise InputError("--serve goes neither with --json nor with --html", do="leave one of them out")
    read_plan(runs[0])  # a folder without a run is refused before a port is taken
    listener = listen(port or 0)

    def say() -> None:
        print_line(console, f"live page of {runs[0]}: {address_of(listener)} (this machine only; Ctrl-C ends it)")

    serve_until_interrupted(listener, runs[0], say)


def _write_page(file: Path, page: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{file} cannot be written: {error.strerror}", where="--html", do="name another file"
        ) from None
    write_whole(file, page)
