"""The planner: config, fleet and model card in, a Plan out, each choice with its reason. Pure: same values, same plan.

The search is small and exhaustive: for each engine that is allowed, with and without activation checkpointing, with and
without keeping gathered weights, every sensible micro-batch size is priced in bytes and seconds, and all of that for
each way to update that is left open. Rules then pick one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Literal

from coremill.config.durations import interval_of
from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.hardware.cores import rank_counts, usable_cores
from coremill.hardware.facts import Fleet
from coremill.plan.activations import documents_apart
from coremill.plan.card import ModelCard, as_written, fully_trained, require_positions
from coremill.plan.dtype import Dtype, WireDtype, choose_dtype, choose_wire_dtype, matmul_flops_per_second
from coremill.plan.engine_cost import WORTH_KEEPING, cost_named, cost_of, engines_for_auto
from coremill.plan.layout import Layout, lay_out
from coremill.plan.length import steps_known, with_epochs_in_words
from coremill.plan.model_choices import activations_choice, logits_choice
from coremill.plan.pricing import Candidate, price
from coremill.plan.reasons import (
    accumulation_reason,
    assumptions,
    attention_reason,
    checkpointing_reason,
    engine_reason,
    micro_batch_reason,
    ranks_reason,
)
from coremill.plan.saving import plan_save
from coremill.plan.splitting import dtype_of_splits
from coremill.plan.types import Arrangement, Choice, FullTraining, Plan, RowCount, RowLengths, StepCounts
from coremill.plan.updating import Update, optimizer_choice, require_update, update_choice, ways_of
from coremill.registry import find

# Tokens per forward pass: below some 2048 products are limited by reading weights, above 8192 only activations grow.
MOST_TOKENS_PER_FORWARD = 8192
# Without matrix units products are slow enough that weights are read in time even for short batches: same speed, less
# memory.
MOST_TOKENS_PER_FORWARD_WITHOUT_UNITS = 1024
# Beside a model that stays as it is, one more pass costs no sum of its gradients and no exchange: what is large enough
# for its products is all that pays.
MOST_TOKENS_PER_FORWARD_BESIDE_A_BASE = 2048

# Where rows differ in length, the longest decide what has to fit, and a pass computes about half as many tokens.
DIFFERING_ROWS = 2

# A whole model on every rank is the plainer thing, but not at any price: ranks of one host that share it exchange
# through memory.
MUCH_SLOWER = 1.1

# Each more rank of a machine takes memory and some seconds to start: it has to bring more of a step than this. Where
# scaling was measured, not much more: two ranks on two cores ran 1.02 to 1.13 times as quick as one in quiet hours,
# 1.86 times beside other programs (`benchmarks.ranks`), and the prediction is off by several percent.
WORTH_MORE_RANKS = {"measured": 1.01, "assumed": 1.03}
# What each takes until it trains, and at the end: short runs have no use for it.
SECONDS_TO_START_A_RANK = 2.0
# Of each pass weights are read once: a rank that has fewer tokens than this takes up to twice as long for each of them
# (width 1536 in bf16 on one Emerald Rapids core: 115 us at 512 tokens, 172 at 128, 245 at 64).
LEAST_TOKENS_OF_A_RANK = 512
AS_BEGUN = "as the run began: another number would add up gradients in another order"

# Beside the ranks: the launcher (65 MB), and either the process that prepares data or what of the fork server ranks
# no longer share with it (33 MB of 280).
LAUNCHER_BYTES = 128 * 2**20


def make_plan(
    config: RunConfig,
    fleet: Fleet,
    card: ModelCard,
    *,
    rows: RowCount | None = None,
    with_remedies: bool = True,
    ranks_before: int | None = None,
) -> Plan:
    """Everything decided before the first rank starts; `rows`: of an epoch, where train.epochs is to be priced;
    `ranks_before`: of all machines, in the run that this one goes on with."""
    _check_inputs(config, card)
    fleet, card, dtype = settled(config, fleet, card)
    counts = step_counts(config)
    steps = steps_known(config, rows, row_tokens=counts.row_tokens, rows_per_step=counts.rows)
    lengths = rows.lengths if rows is not None and counts.rows_differ else None
    layout = _best_layout(config, fleet, card, dtype, ranks_before)
    candidates = list(_candidates(config, fleet, card, layout, dtype, steps=steps, lengths=lengths))
    chosen = _choose(candidates)
    arrangement = chosen.arrangement
    alike = [one for one in candidates if one.arrangement.way == arrangement.way]
    cost = cost_of(arrangement)
    rows_per_step = counts.rows
    shortfall = max(0, chosen.memory.peak.total - chosen.memory.limit)
    plan = Plan(
        fleet=fleet.name,
        nodes=fleet.nodes,
        engine=Choice(arrangement.engine, engine_reason(config, card, chosen, alike)),
        dtype=dtype,
        wire_dtype=_wire_dtype(config, fleet, layout, dtype),
        ranks_per_node=layout.ranks_per_node,
        threads_per_rank=layout.threads_per_rank,
        cpus_of_rank=layout.cpus_of_rank,
        sequence_length=counts.row_tokens,
        row_lengths=lengths,
        rows_per_step=rows_per_step,
        micro_batch_rows=Choice(arrangement.micro_batch_rows, micro_batch_reason(config, chosen, alike)),
        accumulation_steps=Choice(arrangement.accumulation_steps, accumulation_reason(config, arrangement, counts)),
        activation_checkpointing=Choice(
            arrangement.activation_checkpointing, checkpointing_reason(config, chosen, alike)
        ),
        optimizer=optimizer_choice(config, chosen, candidates),
        update=update_choice(config, chosen, candidates),
        keep_gathered=Choice(arrangement.keep_gathered, cost.keep_reason(arrangement, config.parallel.keep_gathered)),
        kept_activations=activations_choice(card),
        attention=attention_reason(card, chosen, fleet),
        logits=logits_choice(card, arrangement, fused=config.model.fused),
        memory=chosen.memory,
        bytes_per_rank_over_the_wire=_bytes_over_the_wire(config, fleet, card, chosen, steps),
        wire_bytes_per_step_per_rank=chosen.traffic.wire_bytes,
        shared_bytes_per_step_per_rank=chosen.traffic.shared_bytes,
        step_seconds=chosen.seconds,
        save=plan_save(config, cost.saved_bytes(card, arrangement), chosen.seconds.total),
        tokens_per_second=rows_per_step * arrangement.row_tokens / chosen.seconds.total,
        samples_per_second=rows_per_step / chosen.seconds.total if counts.rows_differ else None,
        steps=steps,
        usd_per_hour=fleet.usd_per_hour,
        price_words=fleet.price_words,
        pod=None if fleet.pod is None else Choice(fleet.pod, fleet.pod_reason),
        fits=shortfall == 0,
        shortfall_bytes=shortfall,
        remedies=(),
        assumptions=assumptions(fleet, arrangement, card),
        model_flops_per_token=card.flops_per_token(arrangement.row_tokens),
        matmul_flops_per_second=fleet.nodes * matmul_flops_per_second(fleet.calibration, dtype.value),
    )
    plan = with_epochs_in_words(plan, config, rows)
    if not with_remedies:
        return plan
    if card.adapters is not None:
        plan = replace(plan, full_training=_full_training(config, fleet, card, rows))
    if plan.fits:
        return plan
    from coremill.plan.remedies import find_remedies

    return replace(plan, remedies=find_remedies(config, fleet, card, rows))


def _full_training(config: RunConfig, fleet: Fleet, card: ModelCard, rows: RowCount | None) -> FullTraining:
    """What a run with adapters would need without them, on the same machines."""
    plan = make_plan(config, fleet, fully_trained(card), rows=rows, with_remedies=False)
    return FullTraining(
        parameters=card.parameters,
        engine=plan.engine.value,
        fits=plan.fits,
        total_bytes_per_rank=plan.memory.peak.total,
        tokens_per_second=plan.tokens_per_second,
    )


def _bytes_over_the_wire(
    config: RunConfig, fleet: Fleet, card: ModelCard, chosen: Candidate, steps: int | None
) -> int | None:
    """What a rank needs should ranks that mean to share whole weights find that they cannot."""
    if not (cost_of(chosen.arrangement).holds_whole_model and chosen.traffic.through_memory):
        return None
    apart = replace(chosen.arrangement, through_memory=False)
    saving = interval_of(config.checkpoint.every)
    return price(card, apart, fleet, chosen.memory.limit, saving=saving, steps=steps).memory.peak.total


def candidates_of(config: RunConfig, fleet: Fleet, card: ModelCard) -> list[Candidate]:
    """Every arrangement the settings leave open, each with its price."""
    fleet, card, dtype = settled(config, fleet, card)
    found: list[Candidate] = []
    for place, layout in enumerate(_layouts(config, fleet, dtype.value, step_counts(config))):
        with suppress(InputError) if place else nullcontext():
            found += _candidates(config, fleet, card, layout, dtype, steps=config.train.steps)
    return found


def settled(config: RunConfig, fleet: Fleet, card: ModelCard) -> tuple[Fleet, ModelCard, Choice[Dtype]]:
    """What does not depend on memory; fleet and card as the run file has them."""
    parallel, declared = config.parallel, config.fleet.link_gbit_per_second
    if declared is not None and fleet.nodes > 1:
        fleet = replace(fleet, link_bits_per_second=declared * 1e9)
    dtype = choose_dtype(parallel.dtype, fleet.node, fleet.calibration)
    return fleet, card if config.model.fused else as_written(card), dtype


def _wire_dtype(config: RunConfig, fleet: Fleet, layout: Layout, dtype: Choice[Dtype]) -> Choice[WireDtype]:
    world_size = fleet.nodes * layout.ranks_per_node.value
    return choose_wire_dtype(config.parallel.wire_dtype, dtype.value, nodes=fleet.nodes, world_size=world_size)


def _layouts(
    config: RunConfig, fleet: Fleet, dtype: Dtype, counts: StepCounts, ranks_before: int | None = None
) -> list[Layout]:
    """Fewest ranks first. Only those of one machine share memory: of several, each more sends gradients of its own."""
    ranks, threads = _fixed(config.parallel.ranks_per_node), _fixed(config.parallel.threads_per_rank)
    usual = lay_out(fleet.node, ranks=ranks, threads=threads)
    if fleet.nodes > 1 or ranks is not None or threads is not None:
        return [usual]
    least_rows = max(_fixed(config.train.micro_batch_rows) or 1, ceil(LEAST_TOKENS_OF_A_RANK / counts.row_tokens))
    more = {
        count
        for count in rank_counts(fleet.node)[1:]
        if dtype == dtype_of_splits(fleet.calibration)
        and counts.rows % count == 0
        and counts.rows // count >= least_rows
    }
    if ranks_before is not None and usual.ranks_per_node.value != ranks_before <= len(usable_cores(fleet.node)):
        more.add(ranks_before)
    return [usual, *(lay_out(fleet.node, ranks=count, threads=None) for count in sorted(more))]


def _best_layout(
    config: RunConfig, fleet: Fleet, card: ModelCard, dtype: Choice[Dtype], ranks_before: int | None
) -> Layout:
    """The fewest ranks that are not clearly slower than the quickest; of the first way to update that fits.

    By rows of the length they may have, and steps that are set: what data has is known only once it is prepared for
    these ranks."""
    layouts = _layouts(config, fleet, dtype.value, step_counts(config), ranks_before)
    if len(layouts) == 1:
        return layouts[0]
    steps = config.train.steps
    found, offered = [], []
    for layout in layouts:
        # An engine may refuse more ranks than one.
        with nullcontext() if layout is layouts[0] else suppress(InputError):
            found.append(_choose(list(_candidates(config, fleet, card, layout, dtype, steps=steps))))
            offered.append(layout)
    ways: list[tuple[str, str]] = [*ways_of(config)]
    first = min((ways.index(one.arrangement.way) for one in found if one.fits), default=None)

    def seconds(one: Candidate) -> float:
        starting = SECONDS_TO_START_A_RANK * one.arrangement.ranks_per_node
        return one.seconds.total + (starting / steps if steps else 0.0)

    good = [one for one in found if one.fits and ways.index(one.arrangement.way) == first]
    for one in good:
        if one.arrangement.world_size == ranks_before:
            return _because(offered[found.index(one)], AS_BEGUN)
    quickest, worth = min(map(seconds, good), default=0.0), WORTH_MORE_RANKS[fleet.calibration.source]
    chosen = next((one for one in good if seconds(one) <= worth * quickest), found[0])
    others = [one for one in found if not one.fits or one in good]
    return _because(offered[found.index(chosen)], ranks_reason(fleet.calibration, chosen, others, seconds))


def _because(layout: Layout, reason: str) -> Layout:
    return replace(layout, ranks_per_node=replace(layout.ranks_per_node, reason=reason))


def _check_inputs(config: RunConfig, card: ModelCard) -> None:
    """What no arrangement can make right."""
    require_update(config)
    counts = step_counts(config)
    length = counts.row_tokens
    require_positions(length, card.max_positions)
    if counts.rows < 1:
        raise InputError(
            f"{config.train.tokens_per_step} tokens per step are less than one row of {length}",
            where="train.tokens_per_step",
            do=f"set train.tokens_per_step to at least {length}, or make the rows shorter",
        )


def step_counts(config: RunConfig) -> StepCounts:
    """What the task of a run has to compute in a step."""
    counts: StepCounts = find("coremill.tasks", config.task)(config).step_counts()
    return counts


def _candidates(
    config: RunConfig,
    fleet: Fleet,
    card: ModelCard,
    layout: Layout,
    dtype: Choice[Dtype],
    *,
    steps: int | None,
    lengths: RowLengths | None = None,
) -> Iterator[Candidate]:
    ranks_per_node, wire_dtype = layout.ranks_per_node.value, _wire_dtype(config, fleet, layout, dtype)
    world_size = fleet.nodes * ranks_per_node
    counts = step_counts(config)
    length, rank_rows = counts.row_tokens, ceil(counts.rows / world_size)
    limit = (fleet.limit_bytes_per_node - LAUNCHER_BYTES) // ranks_per_node
    asked = config.parallel.engine
    engines = engines_for_auto(world_size) if asked == "auto" else (asked,)
    saving = interval_of(config.checkpoint.every)
    fixed_checkpointing = config.train.activation_checkpointing
    checkpointings = (False, True) if fixed_checkpointing == "auto" else (bool(fixed_checkpointing),)
    most_tokens = MOST_TOKENS_PER_FORWARD if fleet.node.has_bf16_units else MOST_TOKENS_PER_FORWARD_WITHOUT_UNITS
    if counts.rows_differ:
        most_tokens *= DIFFERING_ROWS
    if card.base_parameters:
        most_tokens = min(most_tokens, MOST_TOKENS_PER_FORWARD_BESIDE_A_BASE)
    for (optimizer, update), engine in product(ways_of(config), engines):
        if update not in cost_named(engine).updates:
            continue
        for checkpointing in checkpointings:
            for rows in _row_choices(rank_rows, length, _fixed(config.train.micro_batch_rows), most_tokens, update):
                arrangement = Arrangement(
                    engine=engine,
                    optimizer=optimizer,
                    update=update,
                    dtype=dtype.value,
                    wire_dtype=wire_dtype.value,
                    nodes=fleet.nodes,
                    ranks_per_node=ranks_per_node,
                    threads_per_rank=layout.threads_per_rank.value,
                    sequence_length=length if lengths is None else min(length, lengths.longest),
                    micro_batch_rows=rows,
                    accumulation_steps=ceil(rank_rows / rows),
                    activation_checkpointing=checkpointing,
                    keep_gathered=False,
                    attention=config.model.attention,
                    documents_apart=documents_apart(config.data) and not counts.rows_differ,
                    vocabulary_logits=counts.vocabulary_logits,
                    rows_differ=counts.rows_differ,
                    mean_row_tokens=None if lengths is None else lengths.mean,
                )
                for keep in cost_of(arrangement).keep_choices(arrangement, config.parallel.keep_gathered):
                    kept = replace(arrangement, keep_gathered=keep)
                    yield price(card, kept, fleet, limit, saving=saving, steps=steps)


def _row_choices(rank_rows: int, length: int, fixed: int | None, most_tokens: int, update: Update) -> list[int]:
    """Rows per forward pass worth trying, largest first, each dividing a rank's rows as evenly as can be; where weights
    move inside backward, all of them first."""
    if fixed is not None:
        return [min(fixed, rank_rows)]
    most = max(1, most_tokens // length)
    sizes = {ceil(rank_rows / passes) for passes in range(1, rank_rows + 1)}
    at_once = rank_rows if update == "inside" else 0
    return sorted((rows for rows in sizes if rows <= most or rows == at_once), reverse=True)


def _choose(candidates: list[Candidate]) -> Candidate:
    """Of the first way to update that fits, the whole model on every rank, without recomputing, where that fits and is
    not much slower; else the quickest that fits; else the smallest of all. Inside backward in one pass, where that
    fits: gradients of several would wait for the last."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return min(candidates, key=lambda candidate: candidate.memory.peak.total)
    fitting = [candidate for candidate in fitting if candidate.arrangement.way == fitting[0].arrangement.way]
    if fitting[0].arrangement.update == "inside":
        fitting = [candidate for candidate in fitting if candidate.arrangement.accumulation_steps == 1] or fitting
    quickest = min(candidate.seconds.total for candidate in fitting)
    plain = [one for one in fitting if one.is_plain and one.seconds.total <= MUCH_SLOWER * quickest]
    # Equal seconds go to the larger micro-batch: candidates come largest first, and min keeps the first.
    best = min(plain or fitting, key=lambda candidate: candidate.seconds.total)
    given_back = replace(best.arrangement, keep_gathered=False)
    for candidate in fitting if best.arrangement.accumulation_steps == 1 else ():
        if candidate.arrangement == given_back and candidate.seconds.total <= WORTH_KEEPING * best.seconds.total:
            return candidate
    return best


def _fixed(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value
