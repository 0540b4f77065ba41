"""Encoded rows for `coremill data show`: their tokens, and the answer or the label."""

from __future__ import annotations

import numpy as np

from coremill.config.schema import RunConfig
from coremill.data.encoded import EncodedRows
from coremill.data.encoded_split import EncodedSplit
from coremill.data.grouped_order import GroupedOrder
from coremill.data.loader import evaluation_row_ids
from coremill.tasks.base import ShownRow, evaluated_rows


def encoded_rows_shown(config: RunConfig, rows: EncodedRows, *, count: int, evaluation: bool) -> list[ShownRow]:
    """The first `count` rows that a run takes; of an evaluation as they stand in the data."""
    split = EncodedSplit(rows, "evaluation" if evaluation else "train")
    if evaluation:
        row_ids = evaluation_row_ids(split.count, evaluated_rows(config))[:count]
    else:
        step_rows = min(config.train.samples_per_step, split.count)
        order = GroupedOrder(split.lengths, seed=config.train.seed, rows_per_step=step_rows)
        row_ids = order.rows(0, min(count, split.count))
    examples = split.questions_of(split.row_examples[row_ids]) if rows.kind == "questions" else []
    found = []
    for at, row in enumerate(row_ids.tolist()):
        ids = split.padded(np.array([row]))[0][0]
        learned = np.zeros(int(split.lengths[row]), dtype=bool)
        if rows.kind == "questions":
            start, end = (int(split.targets[name][row]) for name in ("start_positions", "end_positions"))
            inside = start != split.null_position
            learned[start : end + 1] = inside
            summary = f"a window of question {examples[at].id}, with its answer"
            if not inside:
                why = "whose answer is in another window" if examples[at].answers else "which has no answer"
                summary = f"a window of question {examples[at].id}, {why}"
        else:
            summary = f"label {_label(rows, split.targets['labels'][row])}"
        found.append(
            ShownRow(
                row=row,
                ids=tuple(ids.tolist()),
                learned=tuple(learned.tolist()),
                summary=summary,
            )
        )
    return found


def _label(rows: EncodedRows, value: np.generic) -> str:
    assert rows.labels is not None
    if rows.labels.kind == "regression":
        return f"{float(value):g}"
    return rows.labels.names[int(value)] if rows.labels.names else str(int(value))
