"""The half of classification that computes: cross-entropy of classes, squared error of numbers, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from coremill.config.schema import RunConfig
from coremill.data.encoded import EncodedRows
from coremill.data.encoded_batches import EncodedBatch
from coremill.data.labels import Labels
from coremill.plan.types import Choice
from coremill.tasks.base import RowOutput, Scored
from coremill.tasks.encoder.training import EncoderTraining
from coremill.tasks.sequence_classification.scoring import score_rows


class ClassificationTraining(EncoderTraining):
    def __init__(self, config: RunConfig, labels: Labels) -> None:
        super().__init__(config)
        self._labels = labels

    @property
    def loss_words(self) -> Choice[str]:
        if self._labels.kind == "regression":
            return Choice("squared error", "labels are numbers to come close to")
        return Choice("cross-entropy", f"{self._labels.in_words()}")

    def sample_losses(self, outputs: Any, batch: EncodedBatch) -> torch.Tensor:
        logits: torch.Tensor = outputs.logits.float()
        labels = batch.targets["labels"]
        if self._labels.kind == "regression":
            return (logits[:, 0] - labels).square()
        return functional.cross_entropy(logits, labels, reduction="none")

    def row_outputs(self, outputs: Any, batch: EncodedBatch) -> list[RowOutput]:
        return list(outputs.logits.float().numpy())

    def score(self, rows: EncodedRows, row_ids: Sequence[int], outputs: Sequence[RowOutput]) -> Scored:
        return score_rows(rows, np.array(row_ids, dtype=np.int64), np.stack(outputs))
