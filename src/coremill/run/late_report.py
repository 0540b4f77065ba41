"""The report of a run whose first node was lost after the last step: the others have ended, and would be waited for in
vain.

Ranks leave the last step and the export together. Where the first of them wrote down its end, all that is missing is
what the first node does alone: the sample and the report.
"""

from __future__ import annotations

from rich.console import Console

from coremill.checkpoint.changed_settings import NOT_WORTH_SAYING, changes_of
from coremill.checkpoint.continuation import written_config
from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.errors import CoremillError
from coremill.report.events import iter_events
from coremill.report.readers import make_readers
from coremill.report.state import cause_of
from coremill.report.summary import read_plan
from coremill.report.summary_screen import render_summary
from coremill.report.tally import RunTally
from coremill.run.closing import leave_report
from coremill.run.folder import RunFolder
from coremill.run.opening import Options
from coremill.run.prepare import Orders, say
from coremill.world.identity import NodeIdentity


def leave_late_report(
    config: RunConfig, folder: RunFolder, options: Options, console: Console, node: NodeIdentity | None
) -> int | None:
    """The exit code of a run that lacked its report only; None: it is no such run, and goes on as ever."""
    if node is None or node.node_rank != 0 or options.fresh or options.dry_run or options.start_from is not None:
        return None  # a single node starts its ranks again, and waits for nobody
    orders = _orders_of_ended_run(config, folder)
    if orders is None:
        return None
    say(console, f"{folder.path} holds this run, all ranks came to their end: only the report is left to write")
    readers = make_readers(
        folder.path, orders.steps, orders.plan.to_json(), console, page=None, trackers=config.run.trackers
    )
    with readers.closed_after():
        with readers:
            pass  # no rank is started
        summary = leave_report(config, orders, folder, readers, 0)
    exit_code = int(summary["exit_code"])
    if exit_code == 0:
        render_summary(summary, console)
    return exit_code


def _orders_of_ended_run(config: RunConfig, folder: RunFolder) -> Orders | None:
    """What was left for its ranks; None: the run has not ended, or is asked for something that it lacks."""
    if not folder.config.is_file() or folder.report.exists() or (config.run.export and not folder.export.is_dir()):
        return None
    try:
        changes = changes_of(written_config(load_config(folder.config)), config)
        orders = Orders.read(folder.orders)
        tally = RunTally(read_plan(folder.path))
        for event in iter_events(folder.path):
            tally.add(event)
    except (OSError, ValueError, KeyError, TypeError, CoremillError):
        return None  # nothing to go by
    if not tally.first_rank_ended or cause_of(tally) is not None:
        return None
    return None if any(change.key not in NOT_WORTH_SAYING for change in changes) else orders
