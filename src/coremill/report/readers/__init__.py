"""Who follows a run by its events: the screen, report.json, report.html, and a live page, trackers and
metrics for Prometheus where they were asked for."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.report.readers.base import Reader, Readers
from coremill.report.readers.console import RunConsole
from coremill.report.readers.page import PageReader
from coremill.report.readers.report_json import JsonReader
from coremill.report.readers.trackers.reader import trackers_of


def make_readers(
    run_folder: Path,
    steps: int | None,
    plan: Mapping[str, Any],
    console: Console,
    *,
    page: socket.socket | None = None,
    trackers: Sequence[str] = (),
    metrics: socket.socket | None = None,
    node_rank: int | None = None,
) -> Readers:
    """All readers of a run of so many steps; `plan` as in plan.json, `page`: where a live page is to listen.

    `trackers` as run.trackers names them; they come late, for they may take their time when the report is written.
    `metrics`: where Prometheus is to scrape, of the node of this number; None: of all ranks there are.
    """
    readers: list[Reader] = [RunConsole(steps, plan, console), JsonReader(run_folder), PageReader(run_folder)]
    if page is not None:
        from coremill.report.readers.live_page import LivePage  # a server, that few runs want

        readers.append(LivePage(run_folder, page, console))  # after the report: it ends when that is written
    if trackers:
        readers.append(trackers_of(run_folder, trackers, console))
    if metrics is not None:
        from coremill.report.readers.prometheus.reader import MetricsReader

        size = plan["ranks_per_node"]["value"]
        ranks = None if node_rank is None else range(node_rank * size, (node_rank + 1) * size)
        readers.append(MetricsReader(run_folder, metrics, console, ranks))  # served to the very end
    return Readers(run_folder, readers, plan)
