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
from coremill.plan.planner import price, settled, step_counts
from coremill.plan.types import Arrangement, Plan


def with_steps(plan: Plan, config: RunConfig, fleet: Fleet, card: ModelCard, steps: int) -> Plan:
    """For a run of `steps`: as `coremill plan` has it, which counts first."""
    if plan.steps == steps:
        return plan
    fleet, card, *_ = settled(config, fleet, card)
    arrangement, saving = arrangement_of(plan, config), interval_of(config.checkpoint.every)
    memory = price(card, arrangement, fleet, plan.memory.limit, saving=saving, steps=steps).memory
    shortfall = max(0, memory.peak.total - memory.limit)
    return replace(plan, steps=steps, memory=memory, fits=shortfall == 0, shortfall_bytes=shortfall)


def arrangement_of(plan: Plan, config: RunConfig) -> Arrangement:
    """What was chosen, to be priced again."""
    return Arrangement(
        engine=plan.engine.value,
        optimizer=config.train.optimizer,
        dtype=plan.dtype.value,
        wire_dtype=plan.wire_dtype.value,
        nodes=plan.nodes,
        ranks_per_node=plan.ranks_per_node.value,
        threads_per_rank=plan.threads_per_rank.value,
        sequence_length=plan.sequence_length,
        micro_batch_rows=plan.micro_batch_rows.value,
        accumulation_steps=plan.accumulation_steps.value,
        activation_checkpointing=plan.activation_checkpointing.value,
        keep_gathered=plan.keep_gathered.value,
        attention=config.model.attention,
        documents_apart=documents_apart(config.data),
        vocabulary_logits=step_counts(config).vocabulary_logits,
    )
