"""How many steps a run of so many epochs has. Pure: the rows are counted, or estimated, by who knows the data."""

from __future__ import annotations

from dataclasses import replace

from coremill.config.schema import RunConfig
from coremill.plan.types import Plan, RowCount


def steps_of_epochs(epochs: float, rows: int, rows_per_step: int) -> int:
    """Whole steps only, at least one; a step never takes a row twice."""
    return max(1, int(epochs * rows / min(rows, rows_per_step) + 1e-9))  # 2.3 * 100 is 229.99999999999997


def steps_known(config: RunConfig, rows: RowCount | None, *, row_tokens: int, rows_per_step: int) -> int | None:
    """Steps of a run: set, or counted from its epochs; None where its rows are not known."""
    if config.train.epochs is None:
        return config.train.steps
    count = None if rows is None else rows.of_length(row_tokens)
    return None if count is None else steps_of_epochs(config.train.epochs, count, rows_per_step)


def with_epochs_in_words(plan: Plan, config: RunConfig, rows: RowCount | None) -> Plan:
    """The plan of a run whose length is given in epochs, with words on where its steps come from."""
    epochs = config.train.epochs
    if epochs is None or rows is None:
        return plan
    count = rows.of_length(plan.sequence_length)
    if count is None:
        return replace(plan, steps_words=rows.words)
    about = "about " if rows.is_estimate else ""
    passes = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
    words = f"{passes} of {about}{count:,} row{'' if count == 1 else 's'}, {plan.rows_per_step:,} a step"
    words += f": {rows.words}" if rows.words else ""
    return replace(plan, steps_estimated=rows.is_estimate, steps_words=words)
