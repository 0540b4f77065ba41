"""How a rank gets its orders: from the file coremill's launcher left, or prepared by the first rank of each node.

Whoever prepared them, hosts that found different things train nothing, and the plan is rank 0's.
"""

from __future__ import annotations

import atexit
import json
import platform
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from rich.console import Console

from coremill.config.load import LoadedConfig
from coremill.engines import engine_kind
from coremill.errors import InputError
from coremill.files import write_whole
from coremill.hardware.probe import affinity_mask
from coremill.hosts.fingerprint import (
    Fact,
    Facts,
    disagreement,
    facts_from_json,
    facts_of_settings,
    facts_of_versions,
    facts_to_json,
)
from coremill.plan.known_length import with_steps
from coremill.plan.stored import plan_from_json
from coremill.plan.time import LINK_SHARE
from coremill.run.cards import card_for
from coremill.run.folder import RunFolder
from coremill.run.machines import Place, measured_fleet
from coremill.run.opening import (
    Options,
    already_finished,
    begun,
    listen_for_metrics,
    own_run,
    say_basis,
    say_dry_run,
    write_orders,
)
from coremill.run.prepare import Orders, plan_for_rows, prepare_run, say
from coremill.world.group import World
from coremill.world.run_lock import OWNED
from coremill.world.stop import forget_request


def load_together(load: Callable[[], LoadedConfig], world: World) -> LoadedConfig:
    """The run file; a bad one is said once, by the first rank of a node, before the others look at it."""

    def check() -> None:
        load()

    world.once_per_node(check)
    return load()


def orders_of_launcher(loaded: LoadedConfig, folder: RunFolder, world: World) -> Orders:
    """What coremill's launcher on this node has prepared."""
    orders = Orders.read(folder.orders_of(world.node_rank))
    require_alike(world, orders.facts)
    if world.nodes == 1:
        return orders
    return with_cpus_told(_with_one_plan(loaded, orders, folder, world), folder, world)


def prepare_together(loaded: LoadedConfig, folder: RunFolder, world: World, options: Options) -> Orders | None:
    """Under a foreign launcher: the first rank of each node prepares for it; the others wait and share its outcome.

    None where there is nothing to train: a dry run, or a run that is finished already.
    """
    # Before anything that all ranks do together or not at all, as the run file says.
    flags = {"--dry-run": Fact("given" if options.dry_run else "not given")}
    flags["--from"] = Fact(options.start_from or "not given")
    require_alike(world, {**facts_of_versions(), **facts_of_settings(loaded.config.model_dump(mode="json")), **flags})
    cpus = _cpus_of_node(world)
    # One rank speaks for the run; off the terminal, for its output travels through the launcher's pipes.
    console = Console(force_terminal=False, quiet=world.rank != 0)
    options = _as_restarted(options, world, console)
    asks = world.rank == 0 and not options.dry_run
    say_basis(loaded, console, folder)

    def is_finished() -> bool:
        if asks:
            atexit.register(OWNED.release)  # to the end of the process: the report is written last
            own_run(loaded, folder, console)
        asked = world.rank == 0
        is_over = asked and already_finished(loaded.config, folder, options, console, nodes=world.nodes)
        with listen_for_metrics(loaded, wanted=asks and not is_over):
            return is_over  # a port that somebody else has is said now; it is taken once the rows are there

    if world.broadcast(world.once_per_node(is_finished)):
        return None
    link = None if options.dry_run else _link_of(loaded, world, console)
    is_restarted = any(world.gather(world.identity.restarts))  # by torchrun: it may have been asked meanwhile
    place = Place(nodes=world.nodes, ranks_per_node=world.local_size, cpus=cpus, link_bits_per_second=link)

    def prepare_node() -> dict[str, Any]:
        _require_nodes(loaded, world)
        with folder.writable(loaded.where("run.folder")) if asks else nullcontext():
            if asks and not is_restarted:
                forget_request(folder.path)
            before = begun(loaded.config, folder, options)
            return prepare_run(loaded, place, console, force=options.force, before=before).to_json()

    document = world.once_per_node(prepare_node)
    require_alike(world, facts_from_json(document["facts"]))
    document["plan"] = world.broadcast(document["plan"])
    orders = Orders.from_json(document)
    if options.dry_run:
        say_dry_run(orders, folder, console)
        return None

    def leave_orders() -> None:  # not before all hosts agree: what is refused leaves no folder
        if asks:
            write_orders(folder, loaded, orders, options, console)

    world.once_per_node(leave_orders)
    return with_cpus_told(orders, folder, world)


def _as_restarted(options: Options, world: World, console: Console) -> Options:
    """`--from` is for the first start: what torchrun starts anew goes on from what was saved since.

    Only the agent of the rank that failed counts a restart.
    """
    if options.start_from is None or not any(world.gather(world.identity.restarts)):
        return options
    say(console, f"started anew by torchrun: --from {options.start_from} was for its first start")
    return replace(options, start_from=None, restarted=True)


def _require_nodes(loaded: LoadedConfig, world: World) -> None:
    wanted = loaded.config.fleet.nodes
    if wanted not in (1, world.nodes):
        raise InputError(
            f"the config wants {wanted} nodes, the launcher started {world.nodes}",
            where=loaded.where("fleet.nodes"),
            do=f"start {wanted} nodes, or --set fleet.nodes={world.nodes}",
        )


def with_cpus_told(orders: Orders, folder: RunFolder, world: World) -> Orders:
    """Where replicas sit on CPUs that may round differently, the plan says so: they are compared at every save."""
    from torch.backends.cpu import get_cpu_capability

    if world.nodes == 1 or not engine_kind(orders.plan.engine.value).keeps_replicas:
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


def _cpus_of_node(world: World) -> frozenset[int]:
    """What the ranks of this node may use together: each may be bound to cores of its own, by us or by Open MPI."""
    masks = world.gather(sorted(affinity_mask()))
    return frozenset(
        cpu for node, mask in zip(world.node_of_rank, masks, strict=True) if node == world.node_rank for cpu in mask
    )


def _with_one_plan(loaded: LoadedConfig, orders: Orders, folder: RunFolder, world: World) -> Orders:
    """Each node's launcher has planned for itself, before the nodes met: rank 0 plans for all, with the link as it is.

    Threads and cores stay each node's own.
    """
    console = Console(force_terminal=False, quiet=world.rank != 0)
    link = _link_of(loaded, world, console)
    cpus = _cpus_of_node(world)
    plan = orders.plan
    if world.rank == 0 and link is not None:
        place = Place(nodes=world.nodes, ranks_per_node=world.local_size, cpus=cpus, link_bits_per_second=link)
        config = place.settle(loaded.config)
        fleet = measured_fleet(place, lambda text: say(console, text), busy_seconds=0)
        card = card_for(config, orders.model)
        plan = with_steps(plan_for_rows(config, fleet, card, orders.data), config, fleet, card, orders.steps)
        plan = replace(plan, steps_done=orders.plan.steps_done)
        write_whole(folder.plan, json.dumps(plan.to_json(), indent=2) + "\n")
    plan = plan_from_json(world.broadcast(plan.to_json()))
    own = orders.plan
    plan = replace(plan, threads_per_rank=own.threads_per_rank, cpus_of_rank=own.cpus_of_rank)
    return replace(orders, plan=plan)


def _link_of(loaded: LoadedConfig, world: World, console: Console) -> float | None:
    """The rate of a host's network card that would let through what ranks measured; None where nobody needs it."""
    if world.nodes == 1 or loaded.config.fleet.link_gbit_per_second is not None:
        return None
    from coremill.engines.wire.link import measure_link

    payload = measure_link(world)
    console.print(f"network between {world.nodes} hosts: {payload / 1e9:.2g} Gbit/s each, measured", highlight=False)
    return payload / LINK_SHARE
