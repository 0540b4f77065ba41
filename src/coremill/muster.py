"""What surrounds a rank's work: its orders, its threads, and how its failure or progress becomes known."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.config.load import LoadedConfig, load_config
from coremill.errors import CoremillError, InputError, Stopped
from coremill.hardware.facts import Fleet
from coremill.hardware.instances import this_machine
from coremill.hardware.probe import affinity_mask, cache_folder, environment_snapshot, probe_node
from coremill.launch.pulse import PULSE
from coremill.launch.run_folder import RunFolder
from coremill.launch.spot import spot_notices
from coremill.launch.stop import forget_request
from coremill.launcher import (
    Options,
    already_finished,
    measured_rates,
    prepare_with_progress,
    say_dry_run,
    write_orders,
)
from coremill.plan.planner import make_plan
from coremill.plan.stored import plan_from_json
from coremill.plan.time import LINK_SHARE
from coremill.prepare import Orders, card_for
from coremill.report.console import RunConsole
from coremill.report.events import EventFollower, EventWriter
from coremill.report.summary import write_report, write_whole
from coremill.report.summary_screen import render_summary
from coremill.sample import write_sample
from coremill.world import World, as_peer_lost

MEETING_SECONDS = 3.0


def load_together(config_path: Path | None, overrides: Sequence[str], world: World) -> LoadedConfig:
    """The run file; a bad one is said once, by the first rank of a node, before the others look at it."""

    def check() -> None:
        load_config(config_path, overrides)

    world.once_per_node(check)
    return load_config(config_path, overrides)


def orders_for(loaded: LoadedConfig, folder: RunFolder, world: World, options: Options) -> Orders | None:
    """From coremill's launcher, or, under a foreign one, prepared by the first rank of each node; the plan is rank 0's.

    None where there is nothing to train: a dry run, or a run that is finished already.
    """
    if world.identity.launcher == "coremill":
        orders = Orders.read(folder.orders_of(world.node_rank))
        return orders if world.nodes == 1 else _with_one_plan(loaded, orders, folder, world)
    cpus = _cpus_of_node(world)
    # One rank speaks for the run; off the terminal, for its output travels through the launcher's pipes.
    console = Console(force_terminal=False, quiet=world.rank != 0)
    asks = world.rank == 0 and not options.dry_run

    def is_finished() -> bool:
        return asks and not options.fresh and already_finished(loaded.config, folder, console, nodes=world.nodes)

    if world.broadcast(world.once_per_node(is_finished)):
        return None

    link = None if options.dry_run else _link_of(loaded, world, console)

    def prepare_node() -> dict[str, Any]:
        if loaded.config.fleet.nodes not in (1, world.nodes):
            raise InputError(
                f"the config wants {loaded.config.fleet.nodes} nodes, the launcher started {world.nodes}",
                where=loaded.origins["fleet.nodes"].where("fleet.nodes"),
                do=f"start {loaded.config.fleet.nodes} nodes, or --set fleet.nodes={world.nodes}",
            )
        cache = cache_folder(environment_snapshot())
        node = probe_node(mask=cpus)

        def find_fleet() -> Fleet:
            return this_machine(
                node, measured_rates(node, cache, console), nodes=world.nodes, link_bits_per_second=link
            )

        ranks = {"parallel": loaded.config.parallel.model_copy(update={"ranks_per_node": world.local_size})}
        where = loaded.origins["run.folder"].where("run.folder")
        with folder.writable(where) if asks else nullcontext():
            if asks:
                forget_request(folder.path)
            asked = loaded.config.model_copy(update=ranks)
            with loaded.placing():
                orders = prepare_with_progress(asked, find_fleet, cache, options, console)
        if asks:
            write_orders(folder, loaded, orders, fresh=options.fresh)
        return orders.to_json()

    document = world.once_per_node(prepare_node)
    document["plan"] = world.broadcast(document["plan"])
    orders = Orders.from_json(document)
    if options.dry_run:
        say_dry_run(orders, folder, console)
        return None
    return orders


def _cpus_of_node(world: World) -> set[int]:
    """What the ranks of this node may use together: each may be bound to cores of its own, by us or by Open MPI."""
    here = world.hostnames[world.rank]
    masks = world.gather(sorted(affinity_mask()))
    return {cpu for host, mask in zip(world.hostnames, masks, strict=True) if host == here for cpu in mask}


def _with_one_plan(loaded: LoadedConfig, orders: Orders, folder: RunFolder, world: World) -> Orders:
    """Each node's launcher has planned for itself, before the nodes met: rank 0 plans for all, with the link as it is.

    Threads and cores stay each node's own.
    """
    console = Console(force_terminal=False, quiet=world.rank != 0)
    link = _link_of(loaded, world, console)
    cpus = _cpus_of_node(world)
    plan = orders.plan
    if world.rank == 0 and link is not None:
        node = probe_node(mask=cpus, busy_seconds=0)
        rates = measured_rates(node, cache_folder(environment_snapshot()), console)
        ranks = {"parallel": loaded.config.parallel.model_copy(update={"ranks_per_node": world.local_size})}
        config = loaded.config.model_copy(update=ranks)
        fleet = this_machine(node, rates, nodes=world.nodes, link_bits_per_second=link)
        plan = replace(make_plan(config, fleet, card_for(config, orders.model)), steps=orders.steps)
        write_whole(folder.plan, json.dumps(plan.to_json(), indent=2) + "\n")
    plan = plan_from_json(world.broadcast(plan.to_json()))
    mine = {"threads_per_rank": orders.plan.threads_per_rank, "cpus_of_rank": orders.plan.cpus_of_rank}
    return replace(orders, plan=replace(plan, **mine))  # type: ignore[arg-type]


def _link_of(loaded: LoadedConfig, world: World, console: Console) -> float | None:
    """The rate of a host's network card that would let through what ranks measured; None where nobody needs it."""
    if world.nodes == 1 or loaded.config.fleet.link_gbit_per_second is not None:
        return None
    from coremill.parallel.link import measure_link

    payload = measure_link(world)
    console.print(f"network between {world.nodes} hosts: {payload / 1e9:.2g} Gbit/s each, measured", highlight=False)
    return payload / LINK_SHARE


def set_threads(orders: Orders, world: World) -> int:
    """Explicit, whatever the launcher left in the environment (torchrun: 1); inside the mask this rank was given."""
    import torch

    threads = orders.plan.threads_per_rank.value
    if world.identity.launcher != "coremill":
        threads = max(1, min(threads, len(affinity_mask())))
    torch.set_num_threads(threads)
    return threads


@contextmanager
def failures_as_events(events: EventWriter) -> Iterator[None]:
    """A failure is written before the process ends, with this rank's own traceback where it is not the user's input."""
    try:
        yield
    except BaseException as error:
        failure = as_peer_lost(error) or error
        known = isinstance(failure, CoremillError)
        events.write(
            "error",
            message=str(failure) if known else f"{type(failure).__name__}: {failure}",
            traceback=None if isinstance(failure, InputError | Stopped) else traceback.format_exc(),
            exit_code=failure.exit_code if isinstance(failure, CoremillError) else 1,
        )
        raise


@contextmanager
def without_launcher(
    world: World, loaded: LoadedConfig, orders: Orders, folder: RunFolder, events: EventWriter
) -> Iterator[Callable[[], None]]:
    """Under a foreign launcher ranks do what else coremill's launcher does; yields what to call after a step.

    Rank 0 shows the events; the first rank of each host listens for spot notices.
    """
    foreign = world.identity.launcher != "coremill"
    wanted = loaded.config.checkpoint.spot_notices if foreign and world.local_rank == 0 else "off"
    with spot_notices(wanted, environment_snapshot(), lambda text: events.write("notice", text=text)):
        if not foreign or world.rank != 0:
            yield lambda: None
            return
        # Ranks met a moment ago: what is older than that was said by an earlier attempt.
        follower = EventFollower(folder.path, since=time.time() - MEETING_SECONDS)
        with RunConsole(orders.steps, orders.plan.to_json(), Console(force_terminal=False)) as screen:
            with _showing_own_work(screen):
                yield lambda: screen.update(follower.poll())
            screen.update(follower.poll())


@contextmanager
def _showing_own_work(screen: RunConsole) -> Iterator[None]:
    """Rank 0 says how far its own long work is, which else its launcher sees: nobody but a thread is free to."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(1.0):
            screen.take_work([PULSE.reading()])

    thread = threading.Thread(target=show, daemon=True, name="coremill-show")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def close_run(loaded: LoadedConfig, orders: Orders, world: World, folder: RunFolder) -> None:
    """Under a foreign launcher rank 0 leaves the sample and the report, which else the launcher does."""
    if world.identity.launcher == "coremill" or world.rank != 0:
        return
    if loaded.config.sample.prompt and loaded.config.run.export:
        code = orders.model.code_sha256
        write_sample(folder.export, loaded.config.sample, folder.path, environment_snapshot(), code_sha256=code)
    render_summary(write_report(folder.path), Console(force_terminal=False))
