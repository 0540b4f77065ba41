"""What happens around a run before its ranks start: whose folder it is, whether it goes on, what is left for ranks."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from coremill.checkpoint.changed_settings import NOT_WORTH_SAYING, Change, another_config, changes_of
from coremill.checkpoint.continuation import (
    asks_for_more,
    checkpoint_folder,
    clear_checkpoints,
    newest_checkpoint,
    refuse_another_run,
    refuse_fewer_steps,
    refuse_other_base,
    refuse_other_data,
    scores_of,
    words_of_changes,
    written_config,
)
from coremill.checkpoint.manifest import Checkpoint
from coremill.config.continuing import KEYS_OF_THE_END, SCHEDULE_KEYS
from coremill.config.load import LoadedConfig, load_config
from coremill.config.places import CHECKPOINTS, checkpoints_recorded, places_recorded, places_to_record
from coremill.config.schema import AUTO, RunConfig
from coremill.config.show import show
from coremill.errors import InputError
from coremill.files import write_whole
from coremill.hardware.probe import environment_snapshot, probe_node
from coremill.model.lora_base import is_changed
from coremill.plan.words import plural
from coremill.redaction import redact
from coremill.report.events import reset_events
from coremill.report.summary import summarise
from coremill.run.folder import RunFolder
from coremill.run.machines import Place
from coremill.run.prepare import Begun, Orders, say
from coremill.run.start_from import find_checkpoint, forget_start, set_later_aside
from coremill.world.identity import HEAD, NodeIdentity
from coremill.world.run_lock import own_or_join
from coremill.world.stop import ask_to_stop

# Kubeflow's trainer makes 32 ranks of a pod with 32 CPUs unless told otherwise; on a small one that may be meant.
RANK_PER_CORE_IS_A_CHOICE_BELOW = 8


@dataclass(frozen=True)
class Options:
    """What the command line adds to the config."""

    dry_run: bool = False
    fresh: bool = False
    force: bool = False
    start_from: str | None = None  # a step, or best; None: the newest
    restarted: bool = False  # by torchrun, after a start that has followed --from or left it to the ranks
    page: bool = False  # a live page, at this port
    port: int | None = None

    def __post_init__(self) -> None:
        if self.fresh and self.start_from is not None:
            raise InputError(
                "--fresh and --from are both given",
                why="one forgets what was saved, the other goes on from it",
                do="keep one of them",
            )


@contextlib.contextmanager
def listen_for_page(options: Options, *, wanted: bool = True) -> Iterator[socket.socket | None]:
    """Take the port of the live page before anything is started; None where there is to be no page.

    After the block it is given back, also where input was refused: nobody listens there.
    """
    if not wanted:
        yield None
        return
    if options.port is not None and not options.page:
        raise InputError(
            "--port is for the live page", where=f"--port {options.port}", do="add --page, or leave it out"
        )
    if not options.page or options.dry_run:
        yield None
        return
    from coremill.report.page.server import listen

    with listen(options.port or 0) as listener:
        yield listener


@contextlib.contextmanager
def listen_for_metrics(loaded: LoadedConfig, *, wanted: bool = True) -> Iterator[socket.socket | None]:
    """Take the port of run.metrics_port, for the length of the block; None where nobody is to scrape."""
    if not wanted or loaded.config.run.metrics_port is None:
        yield None
        return
    from coremill.report.readers.prometheus import listen_for_scrapes

    with listen_for_scrapes(loaded) as listener:
        yield listener


def folder_of(loaded: LoadedConfig) -> RunFolder:
    """Where a run leaves what it leaves."""
    return RunFolder(Path(loaded.config.run.folder or f"runs/{loaded.name}").absolute())


def own_run(loaded: LoadedConfig, folder: RunFolder, console: Console, node: NodeIdentity | None = None) -> None:
    """Nobody else's run goes on in these folders, and none is begun there before this one ends."""
    own_or_join(
        folder.path,
        checkpoint_folder(loaded.config, folder.path),
        node,
        has_head=HEAD in environment_snapshot(),
        where_run=loaded.where("run.folder"),
        where_checkpoints=loaded.where("checkpoint.folder"),
        say=lambda text: say(console, text),
    )


def say_basis(loaded: LoadedConfig, console: Console, folder: RunFolder | None = None) -> None:
    """Where there is no run file: what the values start from; with one: what was taken from it, and which paths."""
    if loaded.without_file is not None:
        say(console, f"{loaded.without_file}; coremill config show prints it, with the same options")
    for note in (*loaded.notes, *loaded.open_questions, *loaded.places.notes):
        say(console, note)
    if folder is not None and loaded.path is None:
        say(console, f"the run folder is {folder.path}; --set run.folder=... takes another one")


def with_paths_of_run(loaded: LoadedConfig, folder: RunFolder, node_rank: int = 0) -> LoadedConfig:
    """Where the folder holds an earlier run: relative paths mean what they meant there, whatever folder is current."""
    try:
        record = json.loads(folder.orders_of(node_rank).read_text(encoding="utf-8"))["paths"]
        found = replace(loaded, places=places_recorded(loaded.config, loaded.places, record))
        checkpoints = checkpoints_recorded(loaded.config, record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return loaded  # none, or of a release that did not write them down
    if checkpoints is None:
        return found
    config, places = found.config, found.places
    note = f"note: checkpoint.folder: {config.checkpoint.folder} is where this run has it, {checkpoints}"
    section = config.checkpoint.model_copy(update={"folder": checkpoints})
    config = config.model_copy(update={"checkpoint": section})
    places = replace(places, notes=(*places.notes, note), checkpoints=record[CHECKPOINTS])
    return replace(found, config=config, places=places)


def place_of(loaded: LoadedConfig, node: NodeIdentity | None, console: Console) -> Place:
    """This machine with as many nodes and ranks as Kubeflow asks for, unless the user named a number of ranks."""
    nodes, wanted = 1 if node is None else node.nodes, loaded.config.fleet.nodes
    if wanted not in (1, nodes):
        raise InputError(
            f"the config wants {wanted} nodes, but this command starts ranks on {nodes}",
            where=loaded.where("fleet.nodes"),
            why="coremill train starts the ranks of one machine",
            do="name the machines with --hostfile FILE, start the same command on each with torchrun or mpirun, or"
            " --set fleet.nodes=1",
        )
    asked = None if node is None else node.ranks_per_node
    if asked is None or loaded.config.parallel.ranks_per_node != AUTO:
        return Place(nodes=nodes)
    if asked >= max(RANK_PER_CORE_IS_A_CHOICE_BELOW, probe_node().usable_cores):
        text = f"PET_NPROC_PER_NODE={asked} is a rank per core, as Kubeflow fills in where numProcPerNode is left out"
        say(console, f"{text}: left to the plan; --nproc {asked} insists")
        return Place(nodes=nodes)
    return Place(nodes=nodes, ranks_per_node=asked)


def already_finished(
    config: RunConfig, folder: RunFolder, options: Options, console: Console, *, nodes: int = 1, leads: bool = True
) -> bool:
    """A finished run says so, and one of another config is not overwritten unasked; an unfinished one goes on.

    On several hosts this one may have a part of a checkpoint only, or none: what it says then leaves that open.
    """
    if options.fresh or (options.dry_run and options.start_from is None):
        return False
    if options.start_from is not None and not _is_at_its_end(config, folder, options):
        if leads:
            _say_start(config, folder, options.start_from, console)
        return False
    finished = folder.is_finished()
    changes = changes_of(written_config(load_config(folder.config)), config) if finished else []
    if fixed := [change for change in changes if not change.is_allowed]:
        raise another_config(f"{folder.path} holds a finished run of another config", fixed)
    checkpoint = newest_checkpoint(config, folder.path)
    scores = None if checkpoint is None else scores_of(config, checkpoint)
    is_longer = checkpoint is not None and asks_for_more(config, checkpoint)
    why_over = None if scores is None else scores.why_over()
    asked = [change for change in changes if change.key not in NOT_WORTH_SAYING]
    of_the_end = [change for change in asked if change.key in KEYS_OF_THE_END]
    # Of the end itself there may be no checkpoint: what is newest says nothing of whether the run came to it. And where
    # hosts share the folder, another one may have written its config already: steps are compared with those done.
    by_steps = config.train.steps is not None and not folder.is_ended_early()
    is_more = (config.train.steps or 0) > (folder.last_step() or 0) if by_steps else any(map(_is_later, of_the_end))
    goes_on = checkpoint is not None and ((is_longer and is_more) or (bool(asked) and folder.is_ended_early()))
    if finished and checkpoint is None and nodes == 1 and of_the_end and is_more:
        raise another_config(
            f"{folder.path} holds this run, finished", of_the_end, "no checkpoint is left to go on from"
        )
    if finished and (not goes_on or why_over is not None):
        early = f": {why_over}, raise that to go on" if why_over is not None and is_longer else ""
        if of_the_rate := [change for change in changes if change.key in SCHEDULE_KEYS - KEYS_OF_THE_END]:
            what_is_missing = "more train.steps or train.epochs" if checkpoint is not None else "a checkpoint"
            why = early.removeprefix(": ") or f"nothing is left to learn at that without {what_is_missing}"
            raise another_config(f"{folder.path} holds this run, finished", of_the_rate, why)
        text = f"{folder.path} holds this run, finished{early}"
        changed = ", ".join(change.key for change in asked)
        if changed and not early:
            text += f"; that {changed} changed has no effect without more train.steps or train.epochs"
        say(console, f"{text}; coremill report {folder.path} shows it, --fresh runs it anew")
        _say_changed_base(folder, console)
        return True
    if checkpoint is not None:
        refuse_another_run(config, checkpoint)
        if checkpoint.manifest.hosts:  # a part of it: the ranks find out whether the others are there
            say(console, f"this host has its part of step {checkpoint.step}: all hosts agree where the run goes on")
        else:
            say(console, f"continuing from step {checkpoint.step}: {checkpoint.folder}")
    elif folder.config.is_file() and nodes > 1:
        say(console, f"{folder.path} holds an unfinished run, no checkpoint is here: all hosts agree where it goes on")
    elif folder.config.is_file():
        say(console, f"{folder.path} holds an unfinished run without a whole checkpoint: it starts anew")
    return False


def _is_later(change: Change) -> bool:
    """Whether an end is after the one that it takes the place of; steps in place of epochs may be."""
    return change.new is not None and (change.old is None or change.new > change.old)


def _say_changed_base(folder: RunFolder, console: Console) -> None:
    """Of a run with adapters, where the model that they were trained beside is another one now."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, InputError):  # gone, or of an older release
        orders = Orders.read(folder.orders)
        if orders.base is not None and is_changed(orders.base, orders.model):
            say(
                console,
                f"warning: the files of {orders.base.name} have changed since: its adapters were trained beside other"
                " weights and mean nothing beside these; bring those back, or train anew with --fresh",
            )


def _is_at_its_end(config: RunConfig, folder: RunFolder, options: Options) -> bool:
    """Whether `--from` names the step that the finished run here ended with, and asks for nothing that it lacks.

    Of other settings, such as evaluation.rows or more steps, or of an export that is gone, something is left to do.
    """
    if not folder.is_finished() or (config.run.export and not folder.export.is_dir()):
        return False
    changes = changes_of(written_config(load_config(folder.config)), config)
    if any(change.key not in NOT_WORTH_SAYING for change in changes):
        return False
    with contextlib.suppress(InputError):  # said where the step is looked for next
        checkpoint, newest = start_of(config, folder, options), newest_checkpoint(config, folder.path)
        return checkpoint is not None and newest is not None and checkpoint.step == newest.step == folder.last_step()
    return False


def _say_start(config: RunConfig, folder: RunFolder, wanted: str, console: Console) -> None:
    """Refuses a step that is not there, before anything is moved."""
    checkpoint = find_checkpoint(config, folder.path, wanted, "--from")
    refuse_another_run(config, checkpoint)
    scores = scores_of(config, checkpoint)
    found = f" ({scores.in_words(checkpoint.step)})" if scores.metrics_of(checkpoint.step) else ""
    say(console, f"going on from step {checkpoint.step}{found}, as --from {wanted} says: {checkpoint.folder}")


def start_of(config: RunConfig, folder: RunFolder, options: Options) -> Checkpoint | None:
    """The checkpoint that this run goes on from, as far as this host can tell; None: it begins."""
    if options.fresh or options.start_from is None:
        return None if options.fresh else newest_checkpoint(config, folder.path)
    return find_checkpoint(config, folder.path, options.start_from, "--from")


def begun(config: RunConfig, folder: RunFolder, options: Options) -> Begun:
    with contextlib.suppress(InputError):  # of several hosts this one may lack the step; who leads has looked
        checkpoint = start_of(config, folder, options)
        if checkpoint is not None:
            return Begun(checkpoint.step, checkpoint.manifest.world_size)
    return Begun()


def write_orders(
    folder: RunFolder,
    loaded: LoadedConfig,
    orders: Orders,
    options: Options,
    console: Console,
    *,
    node: NodeIdentity | None = None,
) -> None:
    """What the ranks and later readers find in the run folder; a run that goes on keeps what it said so far.

    Several machines may share it: the first one clears it, before any rank can have met another.
    """
    leads = node is None or node.node_rank == 0
    if leads:
        config, wanted = loaded.config, options.start_from
        if options.fresh:
            clear_checkpoints(config, folder.path)
        if not options.restarted:
            forget_start(config, folder.path)
        checkpoint = start_of(config, folder, options)
        goes_on = checkpoint is not None
        if checkpoint is not None:
            refuse_other_data(config, checkpoint, orders.data)
            anew = "; or start anew with --fresh, or set run.folder to a new folder"
            refuse_other_base(checkpoint, orders.base, anew=anew)
            refuse_fewer_steps(config, checkpoint, orders.steps)
            for line in words_of_changes(config, checkpoint, orders.steps):
                say(console, line)
        if checkpoint is not None and wanted is not None:
            set_later_aside(config, folder.path, checkpoint, lambda text: say(console, text))
        folder.clear(keep_events=goes_on, keep_logs=node is not None and node.nodes > 1)
        if not goes_on:
            reset_events(folder.path)
    write_whole(folder.config, show(with_folders_settled(loaded, folder)))
    if leads:
        write_whole(folder.plan, json.dumps(orders.plan.to_json(), indent=2) + "\n")
    node_rank = 0 if node is None else node.node_rank
    paths = places_to_record(loaded.config, loaded.places)
    document = {**orders.to_json(), "command": command_line(sys.argv), "paths": paths}
    write_whole(folder.orders_of(node_rank), json.dumps(document, indent=2) + "\n")


def with_folders_settled(loaded: LoadedConfig, folder: RunFolder) -> LoadedConfig:
    """As the folder of a run has it: whoever reads it there may have another current folder."""
    config = loaded.config
    update: dict[str, object] = {"run": config.run.model_copy(update={"folder": str(folder.path)})}
    if config.checkpoint.folder is not None:
        checkpoints = str(checkpoint_folder(config, folder.path))
        update["checkpoint"] = config.checkpoint.model_copy(update={"folder": checkpoints})
    return replace(loaded, config=config.model_copy(update=update))


def command_line(argv: Sequence[str]) -> str | None:
    """What the user typed, for the report; None where coremill was called from a program."""
    program = Path(argv[0])
    if program.name != "coremill" and (program.name, program.parent.name) != ("__main__.py", "coremill"):
        return None
    return redact(shlex.join(["coremill", *argv[1:]]))


def say_dry_run(orders: Orders, folder: RunFolder, console: Console) -> None:
    """The last line where no rank is started."""
    ranks = plural(orders.plan.world_size, "rank")
    plan = orders.plan
    if plan.steps_done >= orders.steps:
        done = f"{plural(orders.steps, 'step')} of {folder.path} {'is' if orders.steps == 1 else 'are'} done"
        say(console, f"dry run: nothing is left to train, the {done}; --fresh runs it anew")
        return
    steps = (
        plural(orders.steps, "step") if not plan.steps_done else f"steps {plan.steps_done + 1:,} to {orders.steps:,}"
    )
    say(console, f"dry run: {ranks} would run {steps} in {folder.path}")


def stop_run(run: Path, console: Console) -> None:
    """Ask a run that is going to save and end."""
    state = summarise(run)["state"]
    if state != "running":
        say(console, f"{run} is not running: {state}")
        return
    ask_to_stop(run)
    say(console, f"{run} was asked to stop: it saves the step it is in and ends; the same command goes on from there")
