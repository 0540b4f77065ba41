"""The launcher's half of a run: look at the machine, plan, prepare, start ranks, watch, report. No torch."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from coremill.checkpoint.continuation import (
    checkpoint_folder,
    clear_checkpoints,
    fixed_keys,
    newest_checkpoint,
    refuse_another_run,
    refuse_other_data,
    words_of_another_end,
    written_config,
)
from coremill.config.load import LoadedConfig, load_config
from coremill.config.schema import AUTO, RunConfig
from coremill.config.show import show
from coremill.data.packed import Progress
from coremill.errors import InputError, Interrupted, PeerLost, Stopped
from coremill.hardware.calibrate import calibration_of
from coremill.hardware.facts import Calibration, Fleet, NodeFacts
from coremill.hardware.instances import this_machine
from coremill.hardware.probe import cache_folder, environment_snapshot, probe_node
from coremill.plan.types import Plan
from coremill.report.events import EventWriter, read_events, reset_events
from coremill.report.plan_screen import render_plan_short
from coremill.report.progress import AmountProgress, show_error
from coremill.report.readers import make_readers
from coremill.report.summary import summarise, write_whole
from coremill.report.summary_screen import render_summary
from coremill.run.attempts import errors_of, watch_ranks
from coremill.run.prepare import Orders, prepare, words_of_smaller_step
from coremill.run.sample import write_sample
from coremill.run_folder import RunFolder
from coremill.supervise.output import Failure
from coremill.supervise.ranks import Outcome, describe_layout
from coremill.world.identity import HEAD, NodeIdentity
from coremill.world.run_lock import OWNED, own_or_join
from coremill.world.stop import REQUESTS, ask_to_stop, forget_request

# Kubeflow's trainer makes 32 ranks of a pod with 32 CPUs unless told otherwise; on a small one that may be meant.
RANK_PER_CORE_IS_A_CHOICE_BELOW = 8
WORDS_OF_STAGE = {
    "hash": "reading the text",
    "wait": "waiting for another process that prepares the same data",
    "download": "downloading the data",
    "tokenise": "tokenising",
    "hold out": "holding out documents for evaluation",
    "train tokenizer": "making the tokenizer",
}


@dataclass(frozen=True)
class Options:
    """What the command line adds to the config."""

    dry_run: bool = False
    fresh: bool = False
    force: bool = False


def launch(loaded: LoadedConfig, options: Options, node_identity: NodeIdentity | None, console: Console) -> int:
    """Run on this machine, as one node of several where Kubeflow says so; returns the exit code.

    The first node owns the run: its launcher holds the folders to the end, whatever becomes of ranks and other nodes.
    """
    folder = RunFolder(Path(loaded.config.run.folder or f"runs/{loaded.name}").absolute())
    if not not_a_follower(node_identity) and HEAD in environment_snapshot():
        console = Console(quiet=True)  # the first node speaks for all
    with contextlib.ExitStack() as ownership:
        if not options.dry_run:
            ownership.callback(OWNED.release)
            own_run(loaded, folder, console, node_identity)
        return _launch_owned(loaded, options, folder, node_identity, console)


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


def _launch_owned(
    loaded: LoadedConfig, options: Options, folder: RunFolder, node_identity: NodeIdentity | None, console: Console
) -> int:
    config, environ, leads = loaded.config, environment_snapshot(), not_a_follower(node_identity)
    say_basis(loaded, console)
    nodes = 1 if node_identity is None else node_identity.nodes
    if not options.dry_run and not options.fresh and already_finished(config, folder, console, nodes=nodes):
        return 0
    cache = cache_folder(environ)

    def find_fleet() -> Fleet:
        return local_fleet(config, node_identity, cache, console)

    with contextlib.nullcontext() if options.dry_run else folder.writable(loaded.where("run.folder")):
        if leads and not options.dry_run:
            forget_request(folder.path)
        with loaded.placing():
            asked = with_ranks_of_pod(config, node_identity, console)
            orders = prepare_with_progress(asked, find_fleet, cache, options, console)
    if options.dry_run:
        say_dry_run(orders, folder, console)
        return 0

    write_orders(folder, loaded, orders, fresh=options.fresh, node=node_identity)
    readers = make_readers(folder.path, orders.steps, orders.plan.to_json(), console)
    ending = watch_ranks(loaded.config, orders, folder, environ, node_identity, readers)
    outcome = ending.outcome
    if outcome.exit_code == Stopped.exit_code:
        REQUESTS.leave()  # ranks have saved: what is left is to say so
    if outcome.unkillable:
        OWNED.abandon()
    OWNED.check_now()  # what follows is written over another run's, where one has begun here
    if outcome.exit_code == 0 and config.sample.prompt is not None and config.run.export and leads:
        begin_ids, code = orders.data.begin_ids, orders.model.code_sha256
        write_sample(folder.export, config.sample, folder.path, environ, begin_ids=begin_ids, code_sha256=code)
    record_failure(outcome, folder, since=ending.since)
    exit_code = outcome.exit_code
    if leads:
        OWNED.check_now()  # a sample takes its time
        record_stop(outcome, folder, since=ending.since)
        summary = readers.sum_up(exit_code)
        exit_code = int(summary["exit_code"])  # what the screen says and what the command ends with are one value
        if exit_code == 0:
            render_summary(summary, console)
        elif outcome.exit_code == 0:
            show_error(summary["error"]["message"])
    if outcome.exit_code != 0 and HEAD in environ:
        report_to_head(outcome, folder, since=ending.since)
    elif outcome.exit_code != 0:
        explain_failure(outcome, folder, since=ending.since, console=console)
    return exit_code


def already_finished(config: RunConfig, folder: RunFolder, console: Console, *, nodes: int = 1) -> bool:
    """A finished run says so, and one of another config is not overwritten unasked; an unfinished one goes on.

    On several hosts this one may have a part of a checkpoint only, or none: what it says then leaves that open.
    """
    finished = folder.is_finished()
    if finished and (differing := fixed_keys(written_config(load_config(folder.config)), config)):
        raise InputError(
            f"{folder.path} holds a finished run of another config",
            where=", ".join(differing),
            why="a finished run is not overwritten unasked",
            do="set run.folder to a new folder, or start anew with --fresh",
        )
    checkpoint = newest_checkpoint(config, folder.path)
    if finished and not (checkpoint and config.train.steps and config.train.steps > checkpoint.step):
        text = f"{folder.path} holds this run, finished"
        say(console, f"{text}; coremill report {folder.path} shows it, --fresh runs it anew")
        return True
    if checkpoint is not None:
        refuse_another_run(config, checkpoint)
        if checkpoint.manifest.hosts:  # a part of it: the ranks find out whether the others are there
            say(console, f"this host has its part of step {checkpoint.step}: all hosts agree where the run goes on")
        else:
            say(console, f"continuing from step {checkpoint.step}: {checkpoint.folder}")
        if words := words_of_another_end(config, checkpoint):
            say(console, words)
    elif folder.config.is_file() and nodes > 1:
        say(console, f"{folder.path} holds an unfinished run, no checkpoint is here: all hosts agree where it goes on")
    elif folder.config.is_file():
        say(console, f"{folder.path} holds an unfinished run without a whole checkpoint: it starts anew")
    return False


def stop_run(run: Path, console: Console) -> None:
    """Ask a run that is going to save and end."""
    state = summarise(run)["state"]
    if state != "running":
        say(console, f"{run} is not running: {state}")
        return
    ask_to_stop(run)
    say(console, f"{run} was asked to stop: it saves the step it is in and ends; the same command goes on from there")


def with_ranks_of_pod(config: RunConfig, node_identity: NodeIdentity | None, console: Console) -> RunConfig:
    """The config with as many ranks as Kubeflow asks for, unless the user named a number."""
    asked = node_identity.ranks_per_node if node_identity else None
    if asked is None or config.parallel.ranks_per_node != AUTO:
        return config
    if asked >= max(RANK_PER_CORE_IS_A_CHOICE_BELOW, probe_node().usable_cores):
        text = f"PET_NPROC_PER_NODE={asked} is a rank per core, as Kubeflow fills in where numProcPerNode is left out"
        say(console, f"{text}: left to the plan; --nproc {asked} insists")
        return config
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"ranks_per_node": asked})})


def local_fleet(config: RunConfig, node_identity: NodeIdentity | None, cache: Path, console: Console) -> Fleet:
    """This machine, or as many like it as there are nodes."""
    nodes = node_identity.nodes if node_identity else 1
    if config.fleet.nodes not in (1, nodes):
        raise InputError(
            f"the config wants {config.fleet.nodes} nodes, but this command starts ranks on {nodes}",
            where="fleet.nodes",
            why="coremill train starts the ranks of one machine",
            do="start the same command on every node with torchrun or mpirun, or --set fleet.nodes=1",
        )
    node = probe_node()
    return this_machine(node, measured_rates(node, cache, console), nodes=nodes)


def measured_rates(node: NodeFacts, cache: Path, console: Console) -> Calibration:
    """From the cache, or measured now: a few seconds once per machine and torch version."""
    return calibration_of(node, cache, progress=lambda text: say(console, text))


def say(console: Console, text: str) -> None:
    """One finding, one line."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def say_basis(loaded: LoadedConfig, console: Console) -> None:
    """Where there is no run file: what the values start from."""
    if loaded.without_file is not None:
        say(console, f"{loaded.without_file}; coremill config show prints it, with the same --set")


def say_dry_run(orders: Orders, folder: RunFolder, console: Console) -> None:
    """The last line where no rank is started."""
    ranks = "1 rank" if orders.plan.world_size == 1 else f"{orders.plan.world_size} ranks"
    say(console, f"dry run: {ranks} would run {orders.steps:,} steps in {folder.path}")


def refuse_what_does_not_fit(plan: Plan, *, force: bool) -> None:
    """Better now than hours later, killed by the kernel."""
    if plan.fits or force:
        return
    needed, limit = plan.memory.peak.total, plan.memory.limit
    remedies = "; ".join(
        f"{remedy.change} ({' '.join('--set ' + item for item in remedy.settings)})" for remedy in plan.remedies[:3]
    )
    kept = plan.kept_activations
    estimate = f"; what layers keep is an estimate: {kept.reason}" if kept.value == "estimated" else ""
    raise InputError(
        f"the run does not fit: {needed / 1e9:.2f} GB per rank against a limit of {limit / 1e9:.2f} GB",
        where="coremill plan shows the parts",
        why=f"{plan.shortfall_bytes / 1e9:.2f} GB too much on each rank{estimate}",
        do=f"{remedies or 'a smaller model or more machines'}; --force tries anyway",
    )


def prepare_with_progress(
    config: RunConfig, find_fleet: Callable[[], Fleet], cache: Path, options: Options, console: Console
) -> Orders:
    """Show the plan, download and tokenise with a bar each; a bar appears only when there is work."""
    bars: dict[str, AmountProgress] = {}

    def show_plan(plan: Plan) -> None:
        render_plan_short(plan.to_json(), console)
        cost_of_crowding = describe_layout(plan)
        if cost_of_crowding is not None:
            say(console, cost_of_crowding)
        refuse_what_does_not_fit(plan, force=options.force)

    def on_tokens(progress: Progress) -> None:
        words = WORDS_OF_STAGE[progress.stage]
        for earlier in [name for name in bars if name != words]:
            bars.pop(earlier).close()
        counts = f"{progress.documents_done:,} documents, {progress.tokens:,} tokens" if progress.tokens else ""
        if words not in bars:  # making one puts it on the screen
            bars[words] = AmountProgress(words, console)
        bars[words].show(progress.bytes_done, progress.bytes_total, counts)

    orders = None
    try:
        orders = prepare(
            config,
            find_fleet,
            cache=cache,
            on_plan=show_plan,
            on_tokens=on_tokens,
            on_model=lambda text: say(console, text),
        )
    finally:
        for bar in bars.values():
            bar.close(done=orders is not None)
    data = orders.data
    for words in (data.bad_rows_words, data.evaluation_words, words_of_smaller_step(config, data)):
        if words:
            say(console, words)
    return orders


def write_orders(
    folder: RunFolder, loaded: LoadedConfig, orders: Orders, *, fresh: bool, node: NodeIdentity | None = None
) -> None:
    """What the ranks and later readers find in the run folder; a run that goes on keeps what it said so far.

    Several machines may share it: the first one clears it, before any rank can have met another.
    """
    leads = not_a_follower(node)
    if leads:
        if fresh:
            clear_checkpoints(loaded.config, folder.path)
        checkpoint = newest_checkpoint(loaded.config, folder.path)
        goes_on = checkpoint is not None
        if checkpoint is not None:
            refuse_other_data(loaded.config, checkpoint, orders.data)
        folder.clear(keep_events=goes_on, keep_logs=node is not None and node.nodes > 1)
        if not goes_on:
            reset_events(folder.path)
    settled = replace(
        loaded,
        config=loaded.config.model_copy(
            update={"run": loaded.config.run.model_copy(update={"folder": str(folder.path)})}
        ),
    )
    write_whole(folder.config, show(settled))
    if leads:
        write_whole(folder.plan, json.dumps(orders.plan.to_json(), indent=2) + "\n")
    node_rank = 0 if node is None else node.node_rank
    write_whole(folder.orders_of(node_rank), json.dumps(orders.to_json(), indent=2) + "\n")


def not_a_follower(node_identity: NodeIdentity | None) -> bool:
    """Whether this node speaks for the run."""
    return node_identity is None or node_identity.node_rank == 0


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
    error = errors_of(outcome.failed_rank, folder.path, since)[0]
    show_error(error.get("message"), outcome.failed_rank, error.get("traceback"))
