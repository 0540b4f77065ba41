"""report.json: the summary of a run, left in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coremill.files import write_whole
from coremill.report.readers.base import Reader


def summary_text(summary: Mapping[str, Any]) -> str:
    """As `coremill report --json` prints it."""
    return json.dumps(summary, indent=1, allow_nan=False, ensure_ascii=False)


class JsonReader(Reader):
    """Writes report.json, whole or not at all."""

    name, is_vital = "report.json", True

    def __init__(self, run_folder: Path) -> None:
        self._file = run_folder / "report.json"

    def end(self, summary: Mapping[str, Any]) -> None:
        write_whole(self._file, summary_text(summary) + "\n")
