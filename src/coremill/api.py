"""coremill from Python: `load_config`, `plan`, `train` and `report`. The command line is a thin layer over these four.

    from coremill import api

    print(api.plan(model="my-model", data="notes.txt").tokens_per_second)
    result = api.train("run.yaml", settings={"train.steps": 100})
    print(result.state, result.folder, result.summary["loss_last"])

Nothing here imports torch: ranks are processes of their own, also when a notebook starts them. What these functions
print is lines of text where there is no terminal, so progress can be followed in a notebook.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from coremill.config.load import LoadedConfig
from coremill.config.load import load_config as _load_config
from coremill.errors import CoremillError, InputError, Interrupted, Stopped

if TYPE_CHECKING:
    from rich.console import Console

    from coremill.plan.types import Plan
    from coremill.run.command import Ended

__all__ = ["CoremillError", "LoadedConfig", "TrainResult", "TrainingInterrupted"]
__all__ += ["load_config", "plan", "report", "train"]

Config = LoadedConfig | str | os.PathLike[str] | None
Settings = Mapping[str, Any] | Sequence[str]
STOPPED_CODES = (Stopped.exit_code, Interrupted.exit_code)
P = ParamSpec("P")
R = TypeVar("R")
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class TrainResult:
    """How a training ended. `exit_code` is what the command would have ended with; 0 goes with finished and planned."""

    state: Literal["finished", "stopped", "failed", "planned"]  # planned: a dry run
    exit_code: int
    folder: Path  # the run folder
    summary: dict[str, Any] | None  # as `report` gives it; None: a dry run, stopped before it began, no first rank


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C, or the stop button of a notebook: the training has saved and ended, and the same call goes on from there.

    A KeyboardInterrupt, so that a loop over runs ends too, and a notebook runs no further cell.
    """

    def __init__(self, result: TrainResult) -> None:
        where = ""
        if result.summary is not None:
            done = int(result.summary["steps"])
            where = f" after step {done}" if done else " before its first step"
        super().__init__(f"the training in {result.folder} was stopped{where}; the same call goes on from there")
        self.result = result


def _with_hints(function: Callable[P, R]) -> Callable[P, R]:
    """A keyword that is a key of the run file, ours or another tool's, is answered with where it goes."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name not in parameters:
                from coremill.config.unknown_keys import as_settings

                settings = as_settings(name, value, kwargs)
                hint = f"; keys of the run file go in settings: settings={settings!r}" if settings else ""
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")
        return function(*args, **kwargs)

    return call


@_with_hints
def load_config(
    path: str | os.PathLike[str] | None = None,
    settings: Settings = (),
    *,
    model: str | None = None,
    data: str | None = None,
    nproc: int | None = None,
) -> LoadedConfig:
    """A run file, checked: `.config` has its values, `.origins` where each came from.

    `settings` go over the file: {"train.steps": 10}, or ["train.steps=10"] as after --set. Without a file, `model` and
    `data` make a run of one epoch; without those it is the built-in example. `nproc`: ranks on this machine.
    Raises ConfigError with all problems at once.
    """
    return _load_config(None if path is None else Path(path), settings, nproc=nproc, model=model, data=data)


@_with_hints
def plan(
    config: Config = None,
    settings: Settings = (),
    *,
    model: str | None = None,
    data: str | None = None,
    fleet: str | None = None,
) -> Plan:
    """Whether a run fits, how fast it will be and what it costs, each choice with its reason. Reads no weights.

    `config` is a run file or what `load_config` gave; the other arguments are those of `load_config`. `fleet` is
    "4xc7i.8xlarge", a hostfile, or, left out, what the config names, else this machine.
    Raises InputError (a CoremillError) for input that cannot be planned; a run that does not fit is a plan whose `fits`
    is False. `.to_json()` has the keys of `coremill plan --json`.
    """
    from coremill.run.plan_command import plan_and_card

    return plan_and_card(_loaded(config, settings, model, data), fleet)[0]


@_with_hints
def train(
    config: Config = None,
    settings: Settings = (),
    *,
    model: str | None = None,
    data: str | None = None,
    nproc: int | None = None,
    dry_run: bool = False,
    fresh: bool = False,
    force: bool = False,
    start_from: int | str | None = None,
    page: bool = False,
    port: int | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Train: plan, tokenise, start ranks, watch them, export, report. Blocks until the run has ended.

    `config` is a run file or what `load_config` gave; `settings`, `model`, `data` and `nproc` are those of
    `load_config`. A run that was stopped goes on from its newest checkpoint with the same call; `fresh` starts anew.
    `start_from` is a kept step, or "best", to go on from instead of the newest; later ones are set aside.
    `dry_run` checks and plans, `force` starts what does not fit by the plan, `page` serves a page that follows the run,
    at `port` or a free one. `console` is where progress goes; left out: standard output.

    Returns how it ended, also where ranks failed. Raises InputError (a CoremillError) for bad input, and
    TrainingInterrupted (a KeyboardInterrupt) when Ctrl-C stopped it: it has saved by then; a second Ctrl-C ends it at
    once. A SIGTERM before ranks have started, or to one that is a rank itself, is raised as `coremill.errors.Stopped`,
    which `except Exception` lets through. Called from another thread than the main one it hears no Ctrl-C: `coremill
    stop RUN` stops it. One process trains one run at a time. Under torchrun or mpirun every rank makes the same call.
    """
    from coremill.redaction import know
    from coremill.world.stop import REQUESTS, signals_lent

    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise InputError(
            "this process is training already",
            why="both would stop on the same Ctrl-C, and end each other's ranks",
            do="let the other call return, or train in a process of its own",
        )

    def load() -> LoadedConfig:
        return _loaded(config, settings, model, data, nproc)

    is_guest = not REQUESTS.is_listening  # in somebody else's program
    try:
        with signals_lent() if is_guest else contextlib.nullcontext():
            try:
                from coremill.hardware.probe import environment_snapshot

                know(environment_snapshot())
                from coremill.run.command import train_here
                from coremill.run.opening import Options

                wanted = None if start_from is None else str(start_from)
                options = Options(dry_run=dry_run, fresh=fresh, force=force, start_from=wanted, page=page, port=port)
                ended = train_here(load, options, console or _standard_output())
            except (Stopped, Interrupted) as stopped:  # before ranks have started, or this is one
                if not is_guest or REQUESTS.reason != "Ctrl-C":
                    raise
                REQUESTS.leave()
                raise TrainingInterrupted(_stopped_early(load(), stopped.exit_code)) from stopped
            result = _result(ended)
            if ended.by_ctrl_c:
                raise TrainingInterrupted(result)
            return result
    finally:
        _ONE_AT_A_TIME.release()


def report(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The numbers of a run, finished or still going: the keys of `coremill report RUN --json`, ready for JSON."""
    from coremill.report.summary import summarise

    return summarise(Path(run))


def _loaded(
    config: Config, settings: Settings, model: str | None, data: str | None, nproc: int | None = None
) -> LoadedConfig:
    if not isinstance(config, LoadedConfig):
        return load_config(config, settings, model=model, data=data, nproc=nproc)
    if settings or model is not None or data is not None or nproc is not None:
        raise InputError(
            "a config that is loaded already takes no further settings",
            why="each value knows where it was set, and was checked together with the others",
            do="give settings, model, data and nproc to load_config, or give the path of the run file here",
        )
    return config


def _standard_output() -> Console:
    """Plain lines in a notebook: its stream calls itself a terminal, but shows a redrawn line once for each time."""
    from rich.console import Console

    from coremill.redaction import RedactingStream

    stream: Any = RedactingStream(sys.stdout)
    return Console(file=stream, force_jupyter=False, force_terminal=False if Console().is_jupyter else None)


def _result(ended: Ended) -> TrainResult:
    if ended.exit_code == InputError.exit_code:  # a rank found it, and it is on the screen
        refused = InputError(str(((_summary(ended) or {}).get("error") or {}).get("message") or "bad input"))
        refused.silent = True
        raise refused
    state: Literal["finished", "stopped", "failed", "planned"] = "failed"
    if ended.exit_code == 0:
        state = "planned" if ended.is_dry_run else "finished"
    elif ended.exit_code in STOPPED_CODES:
        state = "stopped"
    return TrainResult(state, ended.exit_code, ended.folder, _summary(ended))


def _stopped_early(loaded: LoadedConfig, exit_code: int) -> TrainResult:
    from coremill.run.opening import folder_of

    return TrainResult("stopped", exit_code, folder_of(loaded).path, None)


def _summary(ended: Ended) -> dict[str, Any] | None:
    """The report that the run has left: counted anew from its events it would take seconds, of a long run."""
    if not ended.leaves_report:
        return None
    with contextlib.suppress(OSError, ValueError):
        summary: dict[str, Any] = json.loads((ended.folder / "report.json").read_text(encoding="utf-8"))
        return summary
    with contextlib.suppress(InputError):  # it ended before it had left anything
        return report(ended.folder)
    return None
