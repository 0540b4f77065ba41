"""When a run does not fit: the changes that make it fit, each planned to the end.

First what keeps model, rows and machines as they are and only holds less beside the weights; then the cheapest first.
Last comes bf16 on a CPU that has no units for it, which may be all that fits on one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from coremill.config.schema import AUTO, BUILT_IN, RunConfig
from coremill.hardware.facts import Fleet
from coremill.hardware.instances import Instance, all_instances, fleet_of
from coremill.hardware.pods import pods_of
from coremill.plan.adapters import with_usual_adapters
from coremill.plan.card import ModelCard
from coremill.plan.dtype import bf16_flops_per_second, choose_dtype
from coremill.plan.engine_cost import cost_named
from coremill.plan.planner import make_plan
from coremill.plan.time import DEFAULT_LINK_BITS_PER_SECOND
from coremill.plan.types import Plan, Remedy, RowCount
from coremill.plan.updating import EIGHT_BIT
from coremill.registry import importable

MOST_NODES = 256
SHORTEST_ROW = 64
USUAL_RANK = 16  # of adapters
FREED = "each gradient freed inside backward, as soon as its weight has moved"


@dataclass(frozen=True)
class _Change:
    words: str
    settings: tuple[str, ...]
    config: RunConfig
    fleet: Fleet
    card: ModelCard | None = None  # where the change makes another one


def find_remedies(config: RunConfig, fleet: Fleet, card: ModelCard, rows: RowCount | None = None) -> tuple[Remedy, ...]:
    """Single changes that make the run fit; of a ladder (more nodes, shorter rows) the first rung that does."""

    def first_that_fits(ladder: Iterable[_Change]) -> Iterator[Remedy]:
        for change in ladder:
            plan = make_plan(change.config, change.fleet, change.card or card, rows=rows, with_remedies=False)
            if plan.fits:
                yield _remedy(change, plan)
                return

    found = [remedy for ladder in _ladders(config, fleet, card) for remedy in first_that_fits(ladder)]
    in_bf16 = [*first_that_fits(_in_bf16(config, fleet, card, found))]
    if fleet.node.has_bf16_units:
        found += in_bf16
    # Money first where it is known, else time; last what may take days here.
    found.sort(key=lambda remedy: (remedy.usd is None, remedy.usd or 0.0, -remedy.tokens_per_second))
    lean = [remedy for ladder in _lean_ladders(config, fleet) for remedy in first_that_fits(ladder)]
    return (*lean, *found, *(remedy for remedy in in_bf16 if remedy not in found))


def _remedy(change: _Change, plan: Plan) -> Remedy:
    freed = f", {FREED}" if plan.update.value == "inside" and change.config.train.update == AUTO else ""
    return Remedy(
        change=change.words + freed,
        settings=change.settings,
        total_bytes_per_rank=plan.memory.peak.total,
        tokens_per_second=plan.tokens_per_second,
        usd=plan.usd(),
    )


def _lean_ladders(config: RunConfig, fleet: Fleet) -> Iterator[Iterator[_Change]]:
    """Smaller moments and weights without masters, with gradients after backward or freed inside of it, as the plan
    finds it; and the latter alone."""
    train, engine = config.train, config.parallel.engine
    has_inside = engine == AUTO or "inside" in cost_named(engine).updates
    may_be_inside = has_inside and config.numerics.on_non_finite != "skip"
    words = "moments in 8 bits, weights in the compute dtype alone"
    if train.optimizer == "adamw":
        eight_bit = _set(config, fleet, words, "train", "optimizer", EIGHT_BIT)
        yield iter([eight_bit, _freed(eight_bit)] if train.update == "after" and may_be_inside else [eight_bit])
    if may_be_inside and train.update != "inside":
        yield iter([_freed(_Change("", (), config, fleet))])


def _freed(change: _Change) -> _Change:
    inside = _set(change.config, change.fleet, "", "train", "update", "inside")
    words = f"{change.words}, {FREED}" if change.words else FREED
    return replace(inside, words=words, settings=change.settings + inside.settings)


def _ladders(config: RunConfig, fleet: Fleet, card: ModelCard) -> Iterator[Iterator[_Change]]:
    train, parallel = config.train, config.parallel
    if train.activation_checkpointing is False:
        words = "recompute activations in backward"
        yield iter([_set(config, fleet, words, "train", "activation_checkpointing", "auto")])
    if train.micro_batch_rows != "auto" and train.micro_batch_rows > 1:
        words = "let the plan choose smaller micro-batches"
        yield iter([_set(config, fleet, words, "train", "micro_batch_rows", "auto")])
    if parallel.engine != "auto" and cost_named(parallel.engine).holds_whole_model:
        for name, kind in importable("coremill.engines").items():
            if (relief := kind.cost.relief) is not None:
                yield iter([_set(config, fleet, relief, "parallel", "engine", name)])
    if parallel.ranks_per_node != "auto" and parallel.ranks_per_node > 1:
        yield iter([_set(config, fleet, "fewer ranks per machine", "parallel", "ranks_per_node", 1)])
    if _may_adapt(config, card):
        yield iter([_adapters(config, fleet, card)])
    yield _more_nodes(config, fleet)
    if config.fleet.instance is not None or fleet.pod is not None:
        yield _bigger_instances(config, fleet)
    yield _shorter_rows(config, fleet)


def _set(config: RunConfig, fleet: Fleet, words: str, section: str, key: str, value: object) -> _Change:
    changed = getattr(config, section).model_copy(update={key: value})
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return _Change(words, (f"{section}.{key}={text}",), config.model_copy(update={section: changed}), fleet)


def _may_adapt(config: RunConfig, card: ModelCard) -> bool:
    """Whether adapters could be trained: of a model that has learned nothing there would be nothing to adapt."""
    return config.model.weights == "pretrained" and config.model.name != BUILT_IN and card.frozen is None


def _in_bf16(config: RunConfig, fleet: Fleet, card: ModelCard, others: Sequence[Remedy]) -> Iterator[_Change]:
    """bf16 where the plan computes in fp32; with adapters where neither of the two is enough."""
    if choose_dtype(config.parallel.dtype, fleet.node, fleet.calibration).value == "bf16":
        return
    slower = fleet.calibration.fp32_matmul_flops_per_second / bf16_flops_per_second(fleet.calibration)
    cost = f": products run {slower:.0f} times slower than in fp32" if slower >= 1.5 else ""
    units = "" if fleet.node.has_bf16_units else ", for which this CPU has no units"
    alone = _set(config, fleet, f"arithmetic in bf16{units}{cost}", "parallel", "dtype", "bf16")
    yield alone
    if _may_adapt(config, card) and not any(f"lora.rank={USUAL_RANK}" in remedy.settings for remedy in others):
        both = _adapters(alone.config, fleet, card)
        yield replace(both, words=f"{both.words}, with {alone.words}", settings=both.settings + alone.settings)


def _adapters(config: RunConfig, fleet: Fleet, card: ModelCard) -> _Change:
    words = "train adapters beside the model, which stays as it is (LoRA)"
    return replace(_set(config, fleet, words, "lora", "rank", USUAL_RANK), card=with_usual_adapters(card, USUAL_RANK))


def _more_nodes(config: RunConfig, fleet: Fleet) -> Iterator[_Change]:
    nodes = fleet.nodes
    while nodes < MOST_NODES:
        nodes = nodes + 1 if nodes < 4 else nodes + max(1, nodes // 4)
        price = None if fleet.usd_per_hour is None else fleet.usd_per_hour * nodes / fleet.nodes
        name = f"{nodes} x {fleet.name.removeprefix(f'{fleet.nodes} x ')}"
        larger = replace(fleet, nodes=nodes, name=name, usd_per_hour=price)
        words = f"{nodes} machines instead of {fleet.nodes}"
        if config.fleet.link_gbit_per_second is None and fleet.link_bits_per_second is None:
            words += f", {DEFAULT_LINK_BITS_PER_SECOND / 1e9:.0f} Gbit/s between them assumed"
        yield _set(config, larger, words, "fleet", "nodes", nodes)


def _bigger_instances(config: RunConfig, fleet: Fleet) -> Iterator[_Change]:
    """Instance types of the same generation with more memory, cheapest first."""
    listed = config.kubernetes.instances if fleet.pod is not None else []
    name = config.fleet.instance or (listed[0] if listed else None)
    current = next((one for one in all_instances() if one.name == name), None)
    if current is None:
        return
    for instance in sorted(_alternatives(current), key=lambda one: (one.usd_per_hour or 0.0, one.name)):
        words = f"{instance.name} with {instance.memory_mib // 1024} GiB instead of {current.name}"
        if fleet.pod is None:
            yield _set(config, fleet_of(f"{fleet.nodes}x{instance.name}"), words, "fleet", "instance", instance.name)
            continue
        pods = pods_of(config, nodes=fleet.nodes, instances=(instance,))
        change = _set(config, pods, words, "fleet", "instance", instance.name)
        if listed:
            change = replace(change, settings=(*change.settings, f"kubernetes.instances=[{instance.name}]"))
        yield change


def _alternatives(current: Instance) -> Iterator[Instance]:
    for instance in all_instances():
        has_more = instance.memory_mib > current.memory_mib and instance.cores >= current.cores
        plain = instance.series in ("c", "m", "r") and not instance.is_flex and not instance.bare_metal
        if has_more and plain and instance.usd_per_hour is not None:
            yield instance


def _shorter_rows(config: RunConfig, fleet: Fleet) -> Iterator[_Change]:
    length = config.data.sequence_length // 2
    while length >= SHORTEST_ROW:
        yield _set(config, fleet, f"rows of {length} tokens", "data", "sequence_length", length)
        length //= 2
