"""report.html: the page of a run, left in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coremill.files import write_whole
from coremill.report.page.run_page import render_page
from coremill.report.readers.base import Reader


class PageReader(Reader):
    """Writes report.html, whole or not at all."""

    name = "report.html"

    def __init__(self, run_folder: Path) -> None:
        self._file = run_folder / "report.html"

    def end(self, summary: Mapping[str, Any]) -> None:
        write_whole(self._file, render_page(summary))
