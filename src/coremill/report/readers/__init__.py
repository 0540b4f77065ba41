"""Who follows a run by its events: the screen, report.json, report.html, and trackers of other makers."""

from __future__ import annotations

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
    run_folder: Path, steps: int | None, plan: Mapping[str, Any], console: Console, trackers: Sequence[str] = ()
) -> Readers:
    """All readers of a run of so many steps; `plan` as in plan.json, `trackers` as run.trackers names them.

    Trackers come last: by then report and page are written, whatever becomes of those.
    """
    readers: list[Reader] = [RunConsole(steps, plan, console), JsonReader(run_folder), PageReader(run_folder)]
    if trackers:
        readers.append(trackers_of(run_folder, trackers, console))
    return Readers(run_folder, readers, plan)
