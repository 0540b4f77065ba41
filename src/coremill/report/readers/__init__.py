"""Who follows a run by its events: the screen, report.json, report.html."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.report.readers.base import Readers
from coremill.report.readers.console import RunConsole
from coremill.report.readers.page import PageReader
from coremill.report.readers.report_json import JsonReader


def make_readers(run_folder: Path, steps: int | None, plan: Mapping[str, Any], console: Console) -> Readers:
    """All readers of a run of so many steps; `plan` as in plan.json."""
    readers = (RunConsole(steps, plan, console), JsonReader(run_folder), PageReader(run_folder))
    return Readers(run_folder, readers, plan)
