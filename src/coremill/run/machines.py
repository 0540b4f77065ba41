"""Which machines a run is planned for: this one as it is measured, several like it, or a fleet by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coremill.config.schema import AUTO, RunConfig
from coremill.hardware.calibrate import calibration_of
from coremill.hardware.facts import Fleet
from coremill.hardware.hostfile import read_hostfile
from coremill.hardware.instances import fleet_of, fleet_of_hostfile, this_machine
from coremill.hardware.probe import cache_folder, environment_snapshot, probe_node

BUSY_SECONDS = 0.2  # so long it is watched how much other processes take


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run is going to run, as far as that is known before its plan."""

    nodes: int = 1
    ranks_per_node: int | None = None  # as whoever starts the ranks has it; None: by the run file, or by the plan
    cpus: frozenset[int] | None = None  # of all ranks of this node; None: those of this process
    link_bits_per_second: float | None = None  # between hosts, measured

    def settle(self, config: RunConfig) -> RunConfig:
        """The config with as many ranks as there will be."""
        if self.ranks_per_node is None:
            return config
        parallel = config.parallel.model_copy(update={"ranks_per_node": self.ranks_per_node})
        return config.model_copy(update={"parallel": parallel})


def measured_fleet(place: Place, say: Callable[[str], None], *, busy_seconds: float = BUSY_SECONDS) -> Fleet:
    """This machine, or as many like it as there are nodes; rates are measured once per machine and torch version."""
    node = probe_node(mask=place.cpus, busy_seconds=busy_seconds)
    rates = calibration_of(node, cache_folder(environment_snapshot()), progress=say)
    return this_machine(node, rates, nodes=place.nodes, link_bits_per_second=place.link_bits_per_second)


def fleet_of_hosts(hostfile: str | Path, say: Callable[[str], None], *, busy_seconds: float = BUSY_SECONDS) -> Fleet:
    """The hosts of a hostfile, each taken to be like this machine."""
    here = measured_fleet(Place(), say, busy_seconds=busy_seconds)
    return fleet_of_hostfile(hostfile, here.node, here.calibration)


def find_fleet(config: RunConfig, text: str | None) -> Fleet:
    """`4xc7i.8xlarge`, a hostfile, what the config names, or this machine (measured once, then from the cache)."""
    if text is None and config.fleet.instance is not None:
        text = f"{config.fleet.nodes}x{config.fleet.instance}"
    if text is not None and not Path(text).is_file():
        return fleet_of(text)
    messages = Console(stderr=True)
    if text is None:
        return measured_fleet(Place(nodes=config.fleet.nodes), messages.print)
    return fleet_of_hosts(text, messages.print)


def with_slots(config: RunConfig, fleet: str | None) -> RunConfig:
    """Slots of a hostfile are ranks per node, as `train --hostfile` takes them, unless the run file has a number."""
    if fleet is None or not Path(fleet).is_file() or config.parallel.ranks_per_node != AUTO:
        return config
    slots = set(read_hostfile(fleet).values())
    if len(slots) != 1 or None in slots:
        return config
    parallel = config.parallel.model_copy(update={"ranks_per_node": slots.pop()})
    return config.model_copy(update={"parallel": parallel})
