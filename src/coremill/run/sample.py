"""The sample at the end of a run, as its task makes it."""

from __future__ import annotations

from collections.abc import Mapping

from coremill.config.schema import RunConfig
from coremill.report.events import EventWriter
from coremill.run.prepare import Orders
from coremill.run_folder import RunFolder
from coremill.tasks.base import make_task


def write_sample(config: RunConfig, orders: Orders, folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Ask the export for something to look at and add it to rank 0's events, where there is something to ask."""
    if not config.run.export:
        return
    code_sha256 = orders.model.code_sha256
    found = make_task(config).sample(folder.export, orders.data, environ, code_sha256=code_sha256)
    if found is not None:
        with EventWriter(folder.path, 0) as events:
            events.write("sample", **found)
