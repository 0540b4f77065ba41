"""What a run in a cluster has cost: its nodes by the hour, restarts and waiting included, beside what the plan says.

A run is one of a cluster where its run file is that of pods (`coremill k8s render` puts the run folder on the volume)
and names the type of their nodes. Elsewhere nobody knows what an hour costs, and nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from coremill.config.kubernetes_section import KubernetesSection
from coremill.errors import InputError
from coremill.hardware.instances import instance_named
from coremill.hardware.pods import price_of_pods
from coremill.report.pauses import Span, starts_again
from coremill.report.subject import config_values
from coremill.report.tally import RunTally

# A node stays so long after its pod has gone (NodePool, consolidateAfter): a pause costs that much and no more.
EMPTY_NODE_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class NodePrice:
    """What the nodes of a run cost, all together."""

    instance: str  # the type; of several: c7i.8xlarge or m7i.8xlarge
    nodes: int
    usd_per_hour: float
    price_words: str


def node_price(config_text: str | None) -> NodePrice | None:
    """The price of a run's nodes by its resolved config; None: no run of a cluster, or the type is not known."""
    config = config_values(config_text)
    written, fleet, run = (_section(config, name) for name in ("kubernetes", "fleet", "run"))
    if not written.get("image"):
        return None
    try:
        section = KubernetesSection.model_validate(dict(written))
        named = section.instances or [name for name in [fleet.get("instance")] if name]
        instances = [instance_named(str(name), where="fleet.instance") for name in named]
    except (ValidationError, InputError):
        return None
    is_of_pods = PurePosixPath(str(run.get("folder") or ".")).is_relative_to(section.mount_path)
    nodes = int(fleet.get("nodes") or 1)
    if not is_of_pods or not instances:
        return None
    usd_per_hour, words = price_of_pods(section, instances, nodes)
    if usd_per_hour is None:
        return None
    names = " or ".join(dict.fromkeys(one.name for one in instances))
    return NodePrice(instance=names, nodes=nodes, usd_per_hour=usd_per_hour, price_words=words)


def paid_seconds(wall_seconds: float, pauses: Iterable[Span]) -> float:
    """How long nodes were paid for: from the first word of a rank to the last, and what empty nodes stay in a pause."""
    return wall_seconds + math.fsum(min(until - since, EMPTY_NODE_SECONDS) for since, until in pauses)


def cost_of(tally: RunTally, config_text: str | None, planned_hours: float | None) -> dict[str, Any] | None:
    """The key `cost` of report.json, so far; every attempt after the first is a restart, by whomever."""
    price = node_price(config_text)
    if price is None:
        return None
    hours = paid_seconds(tally.wall_seconds, tally.pauses) / 3600
    return {
        "instance": price.instance,
        "nodes": price.nodes,
        "usd_per_hour": price.usd_per_hour,
        "price_words": price.price_words,
        "hours": hours,
        "restarts": starts_again(tally.spans),
        "usd": hours * price.usd_per_hour,
        "planned_usd": None if planned_hours is None else planned_hours * price.usd_per_hour,
    }


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
