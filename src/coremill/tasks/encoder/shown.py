"""Encoded rows for `coremill data show`: their tokens in the order of the run, and what is learned of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from coremill.config.schema import RunConfig
from coremill.data.encoded import EncodedRows
from coremill.data.encoded_split import EncodedSplit
from coremill.data.grouped_order import GroupedOrder
from coremill.data.order import Positions
from coremill.tasks.base import ShownRow

# Which tokens of a row are learned, and what else there is to say of it.
Learned = Callable[[EncodedSplit, int], tuple[tuple[bool, ...], str]]


def encoded_rows_shown(
    config: RunConfig,
    rows: EncodedRows,
    learned: Learned,
    evaluated: Callable[[EncodedSplit], Positions],
    *,
    count: int,
    evaluation: bool,
) -> list[ShownRow]:
    """The first `count` rows that a run takes; of an evaluation by their numbers."""
    split = EncodedSplit(rows, "evaluation" if evaluation else "train")
    if evaluation:
        row_ids = evaluated(split)[:count]
    else:
        per_step = min(config.train.samples_per_step, split.count)
        order = GroupedOrder(split.lengths, seed=config.train.seed, rows_per_step=per_step)
        row_ids = order.rows(0, min(count, split.count))
    found = []
    for row in row_ids.tolist():
        ids, mask, _ = split.padded(np.array([row]))
        marks, words = learned(split, row)
        found.append(ShownRow(row=row, ids=tuple(ids[0][mask[0]].tolist()), learned=marks, summary=words))
    return found
