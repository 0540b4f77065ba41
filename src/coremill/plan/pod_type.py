"""Which instance type a run in pods takes where the run file names none: the cheapest for its work that it fits."""

from __future__ import annotations

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.hardware.instances import Instance, all_instances
from coremill.hardware.pods import pods_of, room_for_a_pod
from coremill.plan.card import ModelCard
from coremill.plan.compare import usd_per_million_tokens
from coremill.plan.planner import make_plan
from coremill.plan.types import Choice
from coremill.plan.words import plural, size

FAMILIES = ("c7i", "m7i", "r7i", "c8i", "m8i", "r8i")  # those without disks or network cards to pay for
FEWEST_CPUS = 8  # below that most of a node is spent on what every node has to run


def cheapest_type(config: RunConfig, card: ModelCard) -> Choice[Instance]:
    """By dollars per token at the table's prices; a cheap hour that does little is no bargain."""
    section = config.kubernetes
    least_cpus = FEWEST_CPUS if section.cpus == "auto" else section.cpus
    least_gib = 1 if section.memory_gib == "auto" else section.memory_gib
    found: list[tuple[float, str, Instance]] = []
    for instance in all_instances():
        cpus, memory_gib = room_for_a_pod(instance)
        if (
            instance.family not in FAMILIES
            or instance.bare_metal
            or cpus < least_cpus
            or memory_gib < least_gib
            or (section.efa and not instance.efa)
        ):
            continue
        plan = make_plan(config, pods_of(config, instances=(instance,)), card, with_remedies=False)
        price = usd_per_million_tokens(plan)
        if plan.fits and price is not None:
            found.append((price, instance.name, instance))
    if not found:
        nodes = plural(config.fleet.nodes, "pod")
        raise InputError(
            f"the run fits no instance type in {nodes}",
            where="fleet.nodes",
            why=f"its weights alone are {size(4 * card.parameters)} in fp32, and pods get what nodes leave",
            do="set fleet.nodes to more, or name fleet.instance to see what is missing: coremill plan",
        )
    _, _, chosen = min(found)
    return Choice(
        chosen, f"{chosen.name} is the cheapest of {len(found)} types that the run fits, by dollars per token"
    )
