"""Which machines a run is planned for: this one as it is measured, several like it, or a fleet by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from coremill.config.schema import AUTO, RunConfig
from coremill.errors import InputError
from coremill.hardware.calibrate import calibration_of
from coremill.hardware.facts import Fleet
from coremill.hardware.hostfile import read_hostfile
from coremill.hardware.instances import fleet_of, fleet_of_hostfile, nodes_and_instance, this_machine
from coremill.hardware.pods import instances_of, pods_of
from coremill.hardware.probe import cache_folder, environment_snapshot, probe_node
from coremill.hardware.spot_prices import live_spot_prices
from coremill.plan.card import ModelCard
from coremill.plan.pod_type import cheapest_type

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


def find_fleet(config: RunConfig, text: str | None, card: ModelCard | None = None, *, live: bool = False) -> Fleet:
    """`4xc7i.8xlarge`, a hostfile, what the config names, or this machine (measured once, then from the cache).

    With a section kubernetes the machines are those of pods; where no type is named, the cheapest that `card` fits.
    `live`: at the price that EC2 has for spot machines now.
    """
    is_hostfile = text is not None and Path(text).is_file()
    if config.kubernetes.image is not None and not is_hostfile:
        return _fleet_of_pods(config, text, card, live=live)
    if text is None and config.fleet.instance is not None:
        text = f"{config.fleet.nodes}x{config.fleet.instance}"
    if text is not None and not is_hostfile:
        return _at_spot_price(text) if live else fleet_of(text)
    if live:
        raise InputError(
            "there is no instance type to ask the price of",
            where="--live",
            do="name one: --fleet 4xc7i.8xlarge, or fleet.instance in the run file",
        )
    messages = Console(stderr=True)
    if text is None:
        return measured_fleet(Place(nodes=config.fleet.nodes), messages.print)
    return fleet_of_hosts(text, messages.print)


def _at_spot_price(text: str) -> Fleet:
    nodes, instance = nodes_and_instance(text)
    spot = live_spot_prices((instance,))
    return replace(fleet_of(text), usd_per_hour=nodes * spot.usd_per_hour[instance.name], price_words=spot.words)


def _fleet_of_pods(config: RunConfig, text: str | None, card: ModelCard | None, *, live: bool) -> Fleet:
    nodes, instances, reason = config.fleet.nodes, instances_of(config), ""
    if text is not None:
        nodes, instance = nodes_and_instance(text)
        instances = (instance,)
    elif not instances:
        assert card is not None
        chosen = cheapest_type(config, card)
        instances, reason = (chosen.value,), f"{chosen.reason}; "
    section, spot = config.kubernetes, None
    if live and not section.may_be_spot:
        raise InputError(
            f"there is no live price for capacity: {section.capacity}",
            where="--live",
            why="it asks EC2 what spot machines cost now; the prices of others are those of the table",
            do="leave --live out, or set kubernetes.capacity: spot",
        )
    if live:
        spot = live_spot_prices(instances, region=section.region, zone=section.zone)
    fleet = pods_of(config, nodes=nodes, instances=instances, spot=spot)
    return replace(fleet, pod_reason=reason + fleet.pod_reason)


def with_slots(config: RunConfig, fleet: str | None) -> RunConfig:
    """Slots of a hostfile are ranks per node, as `train --hostfile` takes them, unless the run file has a number."""
    if fleet is None or not Path(fleet).is_file() or config.parallel.ranks_per_node != AUTO:
        return config
    slots = set(read_hostfile(fleet).values())
    if len(slots) != 1 or None in slots:
        return config
    parallel = config.parallel.model_copy(update={"ranks_per_node": slots.pop()})
    return config.model_copy(update={"parallel": parallel})
