"""The half of the made-up task that computes: batches of rows with targets, their squared errors, and the root of the
mean of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from coremill.data.loader import FILLER, EvaluationBatches, RowLoader
from coremill.data.order import Positions
from coremill.plan.types import Choice
from coremill.tasks.base import TrainingTask
from mill_guests.row_regression import RegressionRows


@dataclass(frozen=True)
class RegressionBatch:
    """One forward pass of one rank."""

    input_ids: torch.Tensor  # int64 [rows, tokens]
    targets: torch.Tensor  # float32 [rows]
    has_target: torch.Tensor  # float32 [rows]: 0 of a filler
    row_ids: tuple[int, ...]


class _Batches:
    """Turns row ids into tensors."""

    def __init__(self, rows: RegressionRows, *, first: int) -> None:
        with np.load(rows.file) as arrays:
            self._tokens, self._targets = arrays["tokens"][first:], arrays["targets"][first:]
        self.row_tokens = rows.row_tokens

    def valid_targets(self, row_ids: Positions) -> int:
        """One each."""
        return len(row_ids)

    def batch(self, row_ids: Positions, batch_rows: int) -> RegressionBatch:
        """Fillers are copies of the first row, and count nothing."""
        fillers = batch_rows - len(row_ids)
        shown = np.concatenate([row_ids, np.zeros(fillers, np.int64)])
        return RegressionBatch(
            torch.from_numpy(self._tokens[shown]),
            torch.from_numpy(self._targets[shown]),
            (torch.arange(batch_rows) < len(row_ids)).float(),
            (*(int(row) for row in row_ids), *([FILLER] * fillers)),
        )


class RowRegressionTraining(TrainingTask[RegressionRows, RegressionBatch]):
    """What a batch, a loss and a metric are for one number a row."""

    needs_head_in_backward = True

    def prepare(self, model: nn.Module, *, fused: bool) -> Choice[str]:
        """The model is left as it is."""
        return Choice("squared error", "row-regression: one number a row needs no help")

    def choices(self, model: nn.Module) -> Mapping[str, Choice[str]]:
        """None."""
        return {}

    def loss(self, module: nn.Module, batch: RegressionBatch, scale: float) -> torch.Tensor:
        """Sum of squared errors times scale."""
        predicted = module(input_ids=batch.input_ids, use_cache=False).logits[:, 0].float()
        summed: torch.Tensor = ((predicted - batch.targets).square() * batch.has_target).sum()
        return summed * scale

    def metrics(self, mean_loss: float) -> tuple[float]:
        """The root of the mean squared error."""
        return (math.sqrt(mean_loss),)

    def make_loader(
        self,
        rows: RegressionRows,
        *,
        seed: int,
        rows_per_step: int,
        micro_batch_rows: int,
        accumulation_steps: int,
        rank: int,
        world_size: int,
    ) -> RowLoader[RegressionBatch]:
        """The steps of one rank."""
        return RowLoader(
            _Batches(rows, first=0),
            rows=rows.train_rows,
            key=rows.key,
            seed=seed,
            rows_per_step=rows_per_step,
            rank=rank,
            world_size=world_size,
            micro_batch_rows=micro_batch_rows,
            accumulation_steps=accumulation_steps,
        )

    def evaluation_batches(
        self, rows: RegressionRows, *, max_rows: int | None, micro_batch_rows: int, rank: int, world_size: int
    ) -> EvaluationBatches[RegressionBatch]:
        """One rank's share of the last rows."""
        return EvaluationBatches(
            _Batches(rows, first=rows.train_rows),
            rows=rows.evaluation_rows,
            max_rows=max_rows,
            rank=rank,
            world_size=world_size,
            micro_batch_rows=micro_batch_rows,
        )
