"""What surrounds a rank's work: its orders, its threads, and how its failure or progress becomes known."""

from __future__ import annotations

import atexit
import json
import platform
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
from coremill.errors import CoremillError, InputError, Interrupted, Stopped
from coremill.hardware.facts import Fleet
from coremill.hardware.instances import this_machine
from coremill.hardware.probe import affinity_mask, cache_folder, environment_snapshot, probe_node
from coremill.hosts.fingerprint import (
    Fact,
    Facts,
    disagreement,
    facts_from_json,
    facts_of_settings,
    facts_of_versions,
    facts_to_json,
)
from coremill.plan.stored import plan_from_json
from coremill.plan.time import LINK_SHARE
from coremill.report.events import EventFollower, EventWriter
from coremill.report.readers import make_readers
from coremill.report.readers.base import Readers
from coremill.report.summary import write_whole
from coremill.report.summary_screen import render_summary
from coremill.run.launcher import (
    Options,
    already_finished,
    measured_rates,
    own_run,
    prepare_with_progress,
    say_basis,
    say_dry_run,
    write_orders,
)
from coremill.run.prepare import Orders, card_for, plan_for_rows
from coremill.run.sample import write_sample
from coremill.run_folder import RunFolder
from coremill.supervise.spot import spot_notices
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT
from coremill.world.lost_peers import as_peer_lost
from coremill.world.run_lock import OWNED
from coremill.world.stop import forget_request

MEETING_SECONDS = 3.0
SHOW_WORK_SECONDS = 1.0


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
        require_alike(world, orders.facts)
        if world.nodes == 1:
            return orders
        return with_cpus_told(_with_one_plan(loaded, orders, folder, world), folder, world)
    # Before anything that all ranks do together or not at all, as the run file says.
    flags = {"--dry-run": Fact("given" if options.dry_run else "not given")}
    require_alike(world, {**facts_of_versions(), **facts_of_settings(loaded.config.model_dump(mode="json")), **flags})
    cpus = _cpus_of_node(world)
    # One rank speaks for the run; off the terminal, for its output travels through the launcher's pipes.
    console = Console(force_terminal=False, quiet=world.rank != 0)
    asks = world.rank == 0 and not options.dry_run
    say_basis(loaded, console)

    def is_finished() -> bool:
        if asks:
            atexit.register(OWNED.release)  # to the end of the process: the report is written last
            own_run(loaded, folder, console)
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
    require_alike(world, facts_from_json(document["facts"]))
    document["plan"] = world.broadcast(document["plan"])
    orders = Orders.from_json(document)
    if options.dry_run:
        say_dry_run(orders, folder, console)
        return None
    return with_cpus_told(orders, folder, world)


def with_cpus_told(orders: Orders, folder: RunFolder, world: World) -> Orders:
    """Where replicas sit on CPUs that may round differently, the plan says so: they are compared at every save."""
    from torch.backends.cpu import get_cpu_capability

    if world.nodes == 1 or orders.plan.engine.value != "replicate":
        return orders
    # AVX2 and AVX512 give the same bits in fused AdamW and in random numbers (torch 2.13), plain x86 gives others.
    capability = get_cpu_capability().replace("AVX512", "AVX2")
    kinds = dict.fromkeys(world.gather(f"{platform.machine()} {capability}"))
    if len(kinds) == 1:
        return orders
    note = f"that CPUs of different kinds round alike ({', '.join(kinds)}): replicas that drift apart end with 70"
    plan = replace(orders.plan, assumptions=(*orders.plan.assumptions, note))
    if world.rank == 0:
        Console(force_terminal=False).print(f"assumed: {note}", highlight=False, soft_wrap=True)
        write_whole(folder.plan, json.dumps(plan.to_json(), indent=2) + "\n")
    return replace(orders, plan=plan)


def require_alike(world: World, facts: Facts) -> None:
    """Compare what the first rank of each host says of its host; where hosts differ, all ranks end with 78.

    The first rank of each host says why, for each may have a screen of its own; under mpirun there is one.
    """
    if world.nodes == 1:
        return
    told = world.gather(facts_to_json(facts) if world.local_rank == 0 else None)
    by_host = {world.hostnames[rank]: facts_from_json(each) for rank, each in enumerate(told) if each is not None}
    problem = disagreement(by_host)
    if problem is None:
        return

    def refuse() -> None:
        if world.rank == 0 or world.identity.launcher not in ("open-mpi", "hydra"):
            raise problem

    world.once_per_node(refuse)


def _cpus_of_node(world: World) -> set[int]:
    """What the ranks of this node may use together: each may be bound to cores of its own, by us or by Open MPI."""
    masks = world.gather(sorted(affinity_mask()))
    return {
        cpu for node, mask in zip(world.node_of_rank, masks, strict=True) if node == world.node_rank for cpu in mask
    }


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
        plan = plan_for_rows(config, fleet, card_for(config, orders.model), orders.data)
        plan = replace(plan, steps=orders.steps)
        write_whole(folder.plan, json.dumps(plan.to_json(), indent=2) + "\n")
    plan = plan_from_json(world.broadcast(plan.to_json()))
    mine = {"threads_per_rank": orders.plan.threads_per_rank, "cpus_of_rank": orders.plan.cpus_of_rank}
    return replace(orders, plan=replace(plan, **mine))  # type: ignore[arg-type]


def _link_of(loaded: LoadedConfig, world: World, console: Console) -> float | None:
    """The rate of a host's network card that would let through what ranks measured; None where nobody needs it."""
    if world.nodes == 1 or loaded.config.fleet.link_gbit_per_second is not None:
        return None
    from coremill.engines.wire.link import measure_link

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
            traceback=None if isinstance(failure, InputError | Stopped | Interrupted) else traceback.format_exc(),
            exit_code=failure.exit_code if isinstance(failure, CoremillError) else 1,
        )
        raise


def readers_of_rank(orders: Orders, folder: RunFolder) -> Readers:
    """For rank 0 under a foreign launcher; off the terminal, for its output travels through the launcher's pipes."""
    return make_readers(folder.path, orders.steps, orders.plan.to_json(), Console(force_terminal=False))


@contextmanager
def without_launcher(
    world: World, loaded: LoadedConfig, orders: Orders, folder: RunFolder, events: EventWriter, readers: Readers
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
        with readers:

            def after_step() -> None:
                readers.take(follower.poll())
                if readers.tally.last_step >= orders.steps:
                    OWNED.check_now()  # the export follows
                else:
                    OWNED.check()

            with _showing_own_work(readers):
                yield after_step
            readers.take(follower.poll())


@contextmanager
def _showing_own_work(readers: Readers) -> Iterator[None]:
    """Rank 0 says how far its own long work is, which else its launcher sees: nobody but a thread is free to."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(SHOW_WORK_SECONDS):
            readers.take_work([HEARTBEAT.reading()])

    thread = threading.Thread(target=show, daemon=True, name="coremill-show")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def close_run(loaded: LoadedConfig, orders: Orders, world: World, folder: RunFolder, readers: Readers) -> int:
    """Under a foreign launcher rank 0 leaves the sample and the report, which else the launcher does.

    Returns the exit code, which is that of the report.
    """
    if world.identity.launcher == "coremill" or world.rank != 0:
        return 0
    OWNED.check_now()
    if loaded.config.sample.prompt is not None and loaded.config.run.export:
        begin_ids, code = orders.data.begin_ids, orders.model.code_sha256
        sample, environ = loaded.config.sample, environment_snapshot()
        write_sample(folder.export, sample, folder.path, environ, begin_ids=begin_ids, code_sha256=code)
        OWNED.check_now()
    summary = readers.sum_up(exit_code=0)
    render_summary(summary, Console(force_terminal=False))
    return int(summary["exit_code"])
