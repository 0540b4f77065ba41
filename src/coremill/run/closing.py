"""How a run ends: the sample, the report, and of a failure the words of who failed, once, for all readers."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from coremill.config.schema import RunConfig
from coremill.errors import InputError, Interrupted, PeerLost, Stopped
from coremill.files import write_whole
from coremill.hardware.probe import environment_snapshot
from coremill.report.events import EventWriter, read_events
from coremill.report.model_card import license_of, model_card
from coremill.report.progress import show_error
from coremill.report.readers.base import Readers
from coremill.report.step_figures import figures_at
from coremill.report.summary_screen import render_summary
from coremill.run.attempts import Ending, NodeRun, errors_of
from coremill.run.folder import RunFolder
from coremill.run.prepare import Orders, say
from coremill.supervise.output import Failure
from coremill.supervise.ranks import Outcome
from coremill.tasks.base import make_task
from coremill.world.group import World
from coremill.world.identity import HEAD
from coremill.world.run_lock import OWNED
from coremill.world.stop import REQUESTS


def leave_report(
    config: RunConfig, orders: Orders, folder: RunFolder, readers: Readers, exit_code: int
) -> dict[str, Any]:
    """Sample and report, by the one process that speaks for the run; gives what the report says."""
    OWNED.check_now()  # what follows is written over another run's, where one has begun here
    if exit_code == 0 and config.run.export:
        environ, code_sha256 = environment_snapshot(), orders.model.code_sha256
        if config.sample.prompt is not None:
            readers.note("the exported model is loaded with transformers and asked for a sample")
        sample: Mapping[str, str] | None
        try:
            sample = make_task(config).sample(folder.export, orders.data, environ, code_sha256=code_sha256)
        except (Stopped, Interrupted):  # the run is over and exported: only this is given up
            assert config.sample.prompt is not None
            problem = "the exported model was not waited for: Ctrl-C or SIGTERM came"
            sample = {"prompt": config.sample.prompt, "problem": problem}
        REQUESTS.leave()
        if sample is not None:
            with EventWriter(folder.path, 0) as events:
                events.write("sample", **sample)
            OWNED.check_now()  # a sample takes its time
    REQUESTS.leave()  # the outcome is decided: trackers may take their time, and a request changes nothing any more
    summary = readers.sum_up(exit_code)
    if exit_code == 0 and folder.export.is_dir():
        try:
            _leave_card(summary, config, orders, folder)
        except Exception as error:
            readers.note_failure("the model card", error)
    return summary


def _leave_card(summary: dict[str, Any], config: RunConfig, orders: Orders, folder: RunFolder) -> None:
    export = summary["export"] or {}
    licensed, form, step = license_of(orders.model.folder), export.get("form") or "model", export.get("step")
    exported = None if step in (None, summary["steps"]) else figures_at(folder.path, step)
    name = folder.path.name
    card = model_card(summary, config, name=name, license_name=licensed, exported=exported, form=form)
    write_whole(folder.export / "README.md", card)


def close_launcher(run: NodeRun, ending: Ending, console: Console) -> int:
    """After the last attempt; the exit code is the one that stands in the report. One node of several leads."""
    outcome, folder = ending.outcome, run.folder
    if outcome.exit_code == Stopped.exit_code:
        REQUESTS.leave()  # ranks have saved: what is left is to say so
    if outcome.unkillable:
        OWNED.abandon()
    OWNED.check_now()
    record_failure(outcome, folder, since=ending.since)
    exit_code = outcome.exit_code
    if run.leads:
        record_stop(outcome, folder, since=ending.since)
        summary = leave_report(run.config, run.orders, folder, run.readers, exit_code)
        exit_code = int(summary["exit_code"])  # what the screen says and what the command ends with are one value
        if exit_code == 0:
            render_summary(summary, console)
        elif outcome.exit_code == 0:
            show_error(summary["error"]["message"])
    if outcome.exit_code != 0 and HEAD in run.environ:
        report_to_head(outcome, folder, since=ending.since)
    elif outcome.exit_code != 0:
        explain_failure(outcome, folder, since=ending.since, console=console)
    return exit_code


def close_rank(config: RunConfig, orders: Orders, world: World, folder: RunFolder, readers: Readers) -> int:
    """A rank that came to its end; under a foreign launcher rank 0 leaves the report, which else the launcher does."""
    if world.identity.launcher == "coremill" or world.rank != 0:
        return 0
    summary = leave_report(config, orders, folder, readers, 0)
    render_summary(summary, Console(force_terminal=False))
    return int(summary["exit_code"])


def record_failure(outcome: Outcome, folder: RunFolder, *, since: float) -> None:
    """What became of a rank that could not say it itself (killed, or gone before it had joined), for all readers."""
    rank = outcome.failed_rank
    if rank is None or errors_of(rank, folder.path, since):
        return
    message, words = outcome.message.removeprefix(f"rank {rank} "), outcome.log_tail.strip()
    if outcome.exit_code == InputError.exit_code:  # it had said all there is to say, in its log
        message, words = re.split("^coremill: ", words, flags=re.MULTILINE)[-1] or message, ""
    with EventWriter(folder.path, rank) as events:
        events.write("error", message=message, traceback=words or None, exit_code=outcome.exit_code)


def record_stop(outcome: Outcome, folder: RunFolder, *, since: float) -> None:
    """An end on request that no rank could tell: ranks that were ended at once, or had not begun."""
    if outcome.exit_code == 0 or outcome.failed_rank is not None:
        return
    said = [event for event in read_events(folder.path) if event.kind == "error" and event.time >= since]
    if any(event.get("exit_code") == outcome.exit_code for event in said):
        return
    with EventWriter(folder.path, 0) as events:
        events.write("error", message=outcome.message, exit_code=outcome.exit_code, on_request=outcome.on_request)


def report_to_head(outcome: Outcome, folder: RunFolder, *, since: float) -> None:
    """Tell the head on another machine why this node ends for good; it shows the first one's words."""
    rank = -1 if outcome.failed_rank is None else outcome.failed_rank
    errors = errors_of(rank, folder.path, since)
    words = [str(errors[0].get(name)) for name in ("traceback", "message") if errors and errors[0].get(name)]
    failure = Failure(
        rank=rank,
        host=socket.gethostname(),
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        time=time.time(),
        follows=outcome.exit_code == PeerLost.exit_code and outcome.stuck is None,
        tail="\n".join(words) or outcome.message,
    )
    sys.stderr.write(failure.to_line())
    sys.stderr.flush()


def explain_failure(outcome: Outcome, folder: RunFolder, *, since: float, console: Console) -> None:
    """The first failing rank's own words, once; its traceback only where the failure is not the user's input."""
    errors = [event for event in read_events(folder.path) if event.kind == "error" and event.time >= since]
    if outcome.exit_code == Stopped.exit_code:
        said = [event.get("message") for event in errors if event.get("exit_code") == Stopped.exit_code]
        say(console, said[0] if said else f"{outcome.message}; the same command goes on from the last checkpoint")
        return
    if outcome.failed_rank is None:
        at_once = outcome.exit_code == Interrupted.exit_code
        show_error(outcome.message + ("; the same command goes on from the last checkpoint" if at_once else ""))
        return
    error = next(iter(errors_of(outcome.failed_rank, folder.path, since)), None)
    if error is None:  # a full disk kept it from being written
        show_error(outcome.message, outcome.failed_rank)
    else:
        show_error(error.get("message"), outcome.failed_rank, error.get("traceback"))
