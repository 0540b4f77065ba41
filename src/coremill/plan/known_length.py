"""A plan once the rows are counted: the same choices, with the memory of a run of so many steps.

Before, `coremill train` plans a run of so many epochs as a long one, which saves while it trains; whether it does
depends on its length.
"""

from __future__ import annotations

from dataclasses import replace

from coremill.config.durations import interval_of
from coremill.config.schema import RunConfig
from coremill.hardware.facts import Fleet
from coremill.plan.activations import documents_apart
from coremill.plan.card import ModelCard
from coremill.plan.engine_cost import cost_of
from coremill.plan.planner import settled, step_counts
from coremill.plan.pricing import price
from coremill.plan.saving import plan_save
from coremill.plan.types import Arrangement, Plan, RowLengths


def with_steps(
    plan: Plan, config: RunConfig, fleet: Fleet, card: ModelCard, steps: int, lengths: RowLengths | None = None
) -> Plan:
    """For a run of `steps`, of rows as long as they are where they differ: as `coremill plan` has it, which counts
    first."""
    if plan.steps == steps and lengths == plan.row_lengths:
        return plan
    fleet, card, *_ = settled(config, fleet, card)
    plan = replace(plan, row_lengths=lengths)
    arrangement, saving = arrangement_of(plan, config), interval_of(config.checkpoint.every)
    priced = price(card, arrangement, fleet, plan.memory.limit, saving=saving, steps=steps)
    memory = priced.memory
    shortfall = max(0, memory.peak.total - memory.limit)
    plan = replace(plan, steps=steps, memory=memory, fits=shortfall == 0, shortfall_bytes=shortfall)
    if lengths is None:
        return plan
    step_seconds, saved_bytes = priced.seconds.total, cost_of(arrangement).saved_bytes(card, arrangement)
    return replace(
        plan,
        step_seconds=priced.seconds,
        save=plan_save(config, saved_bytes, step_seconds),
        tokens_per_second=plan.rows_per_step * arrangement.row_tokens / step_seconds,
        samples_per_second=plan.rows_per_step / step_seconds,
        model_flops_per_token=card.flops_per_token(lengths.mean),
    )


def arrangement_of(plan: Plan, config: RunConfig) -> Arrangement:
    """What was chosen, to be priced again."""
    counts, lengths = step_counts(config), plan.row_lengths
    return Arrangement(
        engine=plan.engine.value,
        optimizer=plan.optimizer.value,
        update=plan.update.value,
        dtype=plan.dtype.value,
        wire_dtype=plan.wire_dtype.value,
        nodes=plan.nodes,
        ranks_per_node=plan.ranks_per_node.value,
        threads_per_rank=plan.threads_per_rank.value,
        sequence_length=plan.sequence_length if lengths is None else min(plan.sequence_length, lengths.longest),
        micro_batch_rows=plan.micro_batch_rows.value,
        accumulation_steps=plan.accumulation_steps.value,
        activation_checkpointing=plan.activation_checkpointing.value,
        keep_gathered=plan.keep_gathered.value,
        attention=config.model.attention,
        documents_apart=documents_apart(config.data) and not counts.rows_differ,
        vocabulary_logits=counts.vocabulary_logits,
        rows_differ=counts.rows_differ,
        mean_row_tokens=None if lengths is None else lengths.mean,
    )
