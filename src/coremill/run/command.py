"""`coremill train` in this process, whatever started it: as launcher, as one node's launcher, or as a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console

from coremill.config.load import LoadedConfig
from coremill.errors import Interrupted, Stopped
from coremill.hardware.probe import environment_snapshot
from coremill.run.opening import Options, folder_of
from coremill.world.heartbeat import HEARTBEAT
from coremill.world.stop import REQUESTS


@dataclass(frozen=True)
class Ended:
    """What is known when it has ended, in this process."""

    exit_code: int
    folder: Path
    is_dry_run: bool
    leaves_report: bool  # by now: a dry run leaves none, nor do ranks, but for the first under somebody else's launcher
    by_ctrl_c: bool


def train_here(load: Callable[[], LoadedConfig], options: Options, console: Console) -> Ended:
    """Run to the end. `load` is called here: under somebody else's launcher a bad run file is said once, not by all.

    It is called once: what becomes of the run file while the run goes is the next run's.
    """
    load = cache(lambda read=load: read().with_answers())
    environ = environment_snapshot()
    HEARTBEAT.begin(environ)  # before anything slow is imported
    from coremill.run.story import run_as_launcher, run_as_rank
    from coremill.world.identity import identify, identify_node
    from coremill.world.refusal import refusals_told

    identity, node = identify(environ), identify_node(environ)
    if identity is not None:
        exit_code = run_as_rank(load, identity, options)
        loaded = load()
    else:
        with refusals_told(node, environ, dry_run=options.dry_run):
            loaded = load()
            exit_code = run_as_launcher(loaded, options, node, console)
    if identity is not None:
        speaks = identity.rank == 0 and identity.launcher != "coremill"
    else:
        speaks = node is None or node.node_rank == 0
    return Ended(
        exit_code=exit_code,
        folder=folder_of(loaded).path,
        is_dry_run=options.dry_run,
        leaves_report=speaks and not options.dry_run,
        by_ctrl_c=REQUESTS.reason == "Ctrl-C" and exit_code in (Stopped.exit_code, Interrupted.exit_code),
    )
