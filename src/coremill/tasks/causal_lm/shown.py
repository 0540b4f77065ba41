"""Packed rows for `coremill data show`: their tokens, where documents begin, and which tokens are learned."""

from __future__ import annotations

import numpy as np

from coremill.config.schema import RunConfig
from coremill.data.loader import evaluation_row_ids
from coremill.data.packed import LEARNED, STARTS, PackedData
from coremill.data.packed_rows import PackedRows, document_starts, learned_tokens, order_of
from coremill.tasks.base import ShownRow, evaluated_rows


def packed_rows_shown(config: RunConfig, data: PackedData, *, count: int, evaluation: bool) -> list[ShownRow]:
    """The first `count` rows that a run takes."""
    rows = PackedRows(data, "evaluation" if evaluation else "train")
    if evaluation:
        row_ids = evaluation_row_ids(rows.count, evaluated_rows(config))[:count]
    else:
        row_ids = order_of(data, config.train.seed).rows(0, min(count, rows.count))
    ids = rows.tokens(row_ids)
    real = [ids.shape[1]] * len(row_ids)
    if rows.is_marked:
        marks = rows.marks(row_ids)
        starts, learned = (marks & STARTS) != 0, (marks & LEARNED) != 0
        starts[:, :1] = False  # later ones
        real = [rows.learned_and_real(row_ids[index : index + 1])[1] for index in range(len(row_ids))]
    else:
        starts = document_starts(ids, data.eos_id, end_begins_next=data.end_begins_next)
        across = config.data.attention_across_documents
        learned = learned_tokens(starts, across=across, end_begins_next=data.end_begins_next)
    held_out = any(source.evaluation_rows for source in data.sources)
    names = [source.name for source in data.sources] if held_out or not evaluation else []
    return [
        ShownRow(
            row=int(row),
            ids=tuple(ids[index, : real[index]].tolist()),
            learned=tuple(learned[index, : real[index]].tolist()),
            document_starts=tuple(np.flatnonzero(starts[index, : real[index]]).tolist()),
            source=names[rows.part_of(int(row))] if names else "",
            words=f"{ids.shape[1] - real[index]:,} tokens of padding" if real[index] < ids.shape[1] else "",
        )
        for index, row in enumerate(row_ids)
    ]
