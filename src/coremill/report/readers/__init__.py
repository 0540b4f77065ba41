"""Who follows a run by its events: the screen, report.json, report.html, a live page where one was asked for."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.report.readers.base import Reader, Readers
from coremill.report.readers.console import RunConsole
from coremill.report.readers.page import PageReader
from coremill.report.readers.report_json import JsonReader


def make_readers(
    run_folder: Path,
    steps: int | None,
    plan: Mapping[str, Any],
    console: Console,
    *,
    page: socket.socket | None = None,
) -> Readers:
    """All readers of a run of so many steps; `plan` as in plan.json, `page`: where a live page is to listen."""
    readers: list[Reader] = [RunConsole(steps, plan, console), JsonReader(run_folder), PageReader(run_folder)]
    if page is not None:
        from coremill.report.readers.live_page import LivePage  # a server, that few runs want

        readers.append(LivePage(run_folder, page, console))  # last: it ends when the report is written
    return Readers(run_folder, readers, plan)
