"""The half of an encoder's task that computes: what its model is called with, batches, an evaluation's outputs.

A loss is a sum over samples times a scale, in fp32 whatever the model computes in; the scale is one over the samples of
the whole step.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from coremill.config.schema import RunConfig
from coremill.data.encoded import EncodedRows
from coremill.data.encoded_batches import EncodedBatch, EncodedBatches, EncodedEvaluation, EncodedLoader
from coremill.data.encoded_split import EncodedSplit
from coremill.data.loader import FILLER, evaluation_row_ids
from coremill.data.order import Positions
from coremill.plan.types import Choice
from coremill.tasks.base import RowOutput, TrainingTask


class EncoderTraining(TrainingTask[EncodedRows, EncodedBatch]):
    needs_head_in_backward = True

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._token_types = False

    @abstractmethod
    def sample_losses(self, outputs: Any, batch: EncodedBatch) -> torch.Tensor:
        """[rows]: the loss of each sample, by what the model gave, in fp32; of a batch that is no filler."""

    @abstractmethod
    def row_outputs(self, outputs: Any, batch: EncodedBatch) -> list[RowOutput]:
        """What `score` needs of each row."""

    @property
    @abstractmethod
    def loss_words(self) -> Choice[str]:
        """What the loss is, and why."""

    def prepare(self, model: nn.Module, *, fused: bool) -> Choice[str]:
        """The model is left as it is; whether it tells the two texts of a row apart is asked."""
        named = inspect.signature(model.forward).parameters
        kinds = getattr(model.config, "type_vocab_size", 2)
        self._token_types = "token_type_ids" in named and isinstance(kinds, int) and kinds > 1
        return self.loss_words

    def choices(self, model: nn.Module) -> Mapping[str, Choice[str]]:
        return {}

    def loss(self, module: nn.Module, batch: EncodedBatch, scale: float) -> torch.Tensor:
        return self._loss(module(**_inputs(batch), return_dict=True), batch, scale)

    def evaluate(
        self, module: nn.Module, batch: EncodedBatch, scale: float
    ) -> tuple[torch.Tensor, Sequence[RowOutput]]:
        outputs = module(**_inputs(batch), return_dict=True)
        found = [] if batch.row_ids == (FILLER,) else self.row_outputs(outputs, batch)
        return self._loss(outputs, batch, scale), found

    def _loss(self, outputs: Any, batch: EncodedBatch, scale: float) -> torch.Tensor:
        if batch.row_ids == (FILLER,):  # the pass is made for the other ranks' sake, and backward with it
            logits = (value for value in outputs.values() if isinstance(value, torch.Tensor))  # beside hidden states
            return sum((value.float().sum() for value in logits), torch.zeros(())) * 0.0
        return self.sample_losses(outputs, batch).sum() * scale

    def metrics(self, mean_loss: float) -> tuple[float, ...]:
        """They do not follow from the loss: `score` makes them."""
        return ()

    def make_loader(
        self,
        rows: EncodedRows,
        *,
        seed: int,
        rows_per_step: int,
        micro_batch_rows: int,
        accumulation_steps: int,
        rank: int,
        world_size: int,
    ) -> EncodedLoader:
        return EncodedLoader(
            rows,
            token_types=self._token_types,
            seed=seed,
            rows_per_step=rows_per_step,
            rank=rank,
            world_size=world_size,
            micro_batch_rows=micro_batch_rows,
            accumulation_steps=accumulation_steps,
        )

    def evaluated(self, split: EncodedSplit, max_rows: int | None) -> Positions:
        """Which rows an evaluation takes."""
        return evaluation_row_ids(split.count, max_rows)

    def evaluation_batches(
        self, rows: EncodedRows, *, max_rows: int | None, micro_batch_rows: int, rank: int, world_size: int
    ) -> EncodedEvaluation:
        split = EncodedSplit(rows, "evaluation")
        return EncodedEvaluation(
            EncodedBatches(split, token_types=self._token_types),
            self.evaluated(split, max_rows),
            rank=rank,
            world_size=world_size,
            micro_batch_rows=micro_batch_rows,
        )


def _inputs(batch: EncodedBatch) -> dict[str, torch.Tensor]:
    """Without a mask where nothing is padded: attention is quicker then."""
    named = {"attention_mask": batch.attention_mask, "token_type_ids": batch.token_type_ids}
    return {"input_ids": batch.input_ids, **{name: value for name, value in named.items() if value is not None}}
