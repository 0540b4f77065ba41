"""What surrounds a rank's work: its orders, its threads, and how its failure or progress becomes known."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from coremill.config.load import LoadedConfig
from coremill.errors import CoremillError, InputError
from coremill.hardware.calibrate import calibration_of
from coremill.hardware.instances import this_machine
from coremill.hardware.probe import affinity_mask, cache_folder, environment_snapshot, probe_node
from coremill.launch.run_folder import RunFolder
from coremill.launcher import refuse_what_does_not_fit, write_orders
from coremill.prepare import Orders, prepare
from coremill.report.console import RunConsole
from coremill.report.events import EventFollower, EventWriter
from coremill.report.plan_screen import render_plan_short
from coremill.report.summary import write_report
from coremill.report.summary_screen import render_summary
from coremill.sample import write_sample
from coremill.world import World, as_peer_lost


def orders_for(loaded: LoadedConfig, folder: RunFolder, world: World) -> Orders:
    """From coremill's launcher; under a foreign one prepared by the first rank of each node, with rank 0's plan."""
    if world.identity.launcher == "coremill":
        return Orders.read(folder.orders)
    here = world.hostnames[world.rank]
    masks = world.gather(sorted(affinity_mask()))
    # Open MPI binds each rank to cores of its own: the node's ranks together show what the node gives us.
    cpus = {cpu for host, mask in zip(world.hostnames, masks, strict=True) if host == here for cpu in mask}

    def prepare_node() -> dict[str, Any]:
        environ = environment_snapshot()
        cache = cache_folder(environ)
        node = probe_node(mask=cpus)
        fleet = this_machine(node, calibration_of(node, cache), nodes=world.nodes)
        ranks = {"parallel": loaded.config.parallel.model_copy(update={"ranks_per_node": world.local_size})}
        config = loaded.config.model_copy(update=ranks)
        if loaded.config.fleet.nodes not in (1, world.nodes):
            raise InputError(
                f"the config wants {loaded.config.fleet.nodes} nodes, the launcher started {world.nodes}",
                where=loaded.origins["fleet.nodes"].where("fleet.nodes"),
                do=f"start {loaded.config.fleet.nodes} nodes, or --set fleet.nodes={world.nodes}",
            )
        if world.rank == 0:
            folder.make_writable(loaded.origins["run.folder"].where("run.folder"))
        orders = prepare(config, fleet, cache=cache, on_plan=lambda plan: refuse_what_does_not_fit(plan, force=False))
        if world.rank == 0:
            write_orders(folder, loaded, orders)
            render_plan_short(orders.plan.to_json(), Console())
        return orders.to_json()

    document = world.once_per_node(prepare_node)
    document["plan"] = world.broadcast(document["plan"])
    return Orders.from_json(document)


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
            traceback=None if isinstance(failure, InputError) else traceback.format_exc(),
            exit_code=failure.exit_code if isinstance(failure, CoremillError) else 1,
        )
        raise


@contextmanager
def shown_by_rank_0(world: World, orders: Orders, folder: RunFolder) -> Iterator[Callable[[], None]]:
    """Under a foreign launcher nobody watches the events: rank 0 shows them. Yields what to call after a step."""
    if world.identity.launcher == "coremill" or world.rank != 0:
        yield lambda: None
        return
    follower = EventFollower(folder.path)
    with RunConsole(orders.steps, orders.plan.to_json(), Console(force_terminal=False)) as screen:
        yield lambda: screen.update(follower.poll())
        screen.update(follower.poll())


def close_run(loaded: LoadedConfig, world: World, folder: RunFolder) -> None:
    """Under a foreign launcher rank 0 leaves the sample and the report, which else the launcher does."""
    if world.identity.launcher == "coremill" or world.rank != 0:
        return
    if loaded.config.sample.prompt and loaded.config.run.export:
        write_sample(folder.export, loaded.config.sample, folder.path, environment_snapshot())
    render_summary(write_report(folder.path), Console())
