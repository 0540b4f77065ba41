"""The half of question answering that computes: where answers begin and end, as cross-entropy over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from coremill.data.encoded import EncodedRows
from coremill.data.encoded_batches import EncodedBatch
from coremill.data.encoded_split import EncodedSplit
from coremill.data.order import Positions
from coremill.plan.types import Choice
from coremill.tasks.base import RowOutput, Scored
from coremill.tasks.encoder.training import EncoderTraining
from coremill.tasks.question_answering.scoring import rows_of_whole_questions, score_windows


class QuestionAnsweringTraining(EncoderTraining):
    @property
    def loss_words(self) -> Choice[str]:
        return Choice("cross-entropy", "the mean of that of where an answer begins and of where it ends")

    def sample_losses(self, outputs: Any, batch: EncodedBatch) -> torch.Tensor:
        starts = _cross_entropy(outputs.start_logits, batch, "start_positions")
        return (starts + _cross_entropy(outputs.end_logits, batch, "end_positions")) / 2

    def row_outputs(self, outputs: Any, batch: EncodedBatch) -> list[RowOutput]:
        """The logits of its tokens, those of the beginning first."""
        both = torch.stack([outputs.start_logits, outputs.end_logits], dim=1).float().numpy()
        spans = zip(both, batch.first_tokens, batch.lengths, strict=True)
        return [np.ascontiguousarray(row[:, first : first + length]).reshape(-1) for row, first, length in spans]

    def evaluated(self, split: EncodedSplit, max_rows: int | None) -> Positions:
        """Windows of whole questions."""
        return rows_of_whole_questions(split.row_examples, max_rows)

    def score(self, rows: EncodedRows, row_ids: Sequence[int], outputs: Sequence[RowOutput]) -> Scored:
        return score_windows(rows, row_ids, outputs, self._config.evaluation)


def _cross_entropy(logits: torch.Tensor, batch: EncodedBatch, target: str) -> torch.Tensor:
    """Over the tokens of a row. Padding is no place for an answer: were it one, the loss of a row would depend on which
    rows it is computed with."""
    logits = logits.float()
    if batch.attention_mask is not None:
        logits = logits.masked_fill(batch.attention_mask == 0, -torch.inf)
    return functional.cross_entropy(logits, batch.targets[target], reduction="none")
