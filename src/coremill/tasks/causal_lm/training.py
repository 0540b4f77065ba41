"""Causal language modelling: predict the next token of packed rows.

The loss is the model's own. For most it is the cross-entropy of what the head returns and nothing else: then it is made
inside the head, a chunk of logits at a time. What a model does besides (loss_path.py) is kept: an addition to the
loss (a mixture's balance among experts) is added by the model itself to the chunked loss; where logits are changed
behind the head, or the loss is another one, whole logits are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from coremill.config.schema import DataSection
from coremill.data.loader import EvaluationBatches, RowLoader
from coremill.data.packed import PackedData
from coremill.data.packed_batches import IGNORED, Batch, evaluation_batches, make_loader
from coremill.model.build import parts_not_found
from coremill.model.chunked_loss import HeadLoss, logits_loss
from coremill.model.documents import documents_of
from coremill.model.tied_lookup import tied_lookup
from coremill.plan.model_choices import NOT_FUSED
from coremill.plan.types import Choice
from coremill.tasks.base import TrainingTask
from coremill.tasks.causal_lm.loss_path import LossPath, find_loss_path


class CausalLmTraining(TrainingTask[PackedData, Batch]):
    def __init__(self, section: DataSection, *, conversations: bool = False) -> None:
        """`conversations`: rows hold these; they are kept apart wherever the model can."""
        self._section, self._conversations = section, conversations
        self._across = section.attention_across_documents and not conversations
        self._head_loss: HeadLoss | None = None
        self._path = LossPath(chunked=False, cross_entropy=True, more=False, reason="")

    def prepare(self, model: nn.Module, *, fused: bool = True) -> Choice[str]:
        """Put the chunked loss into the head where its output is the logits; before the engine places the model.

        Unless `fused` the head stays as it is (model/changes.py)."""
        if model.get_output_embeddings() is None:  # type: ignore[operator]
            raise parts_not_found(model, "no output head")
        path = find_loss_path(model)
        if path.chunked and not fused:
            path = replace(path, chunked=False, reason=NOT_FUSED)
        self._path = path
        more = "; to it the model adds a loss of its own, as its config asks" if path.more else ""
        if not path.chunked:
            kept = "the model's own arithmetic" if path.cross_entropy else "the model's own loss"
            return Choice("logits", f"{path.reason}, so whole logits are made and {kept} is kept{more}")
        head = model.get_output_embeddings()  # type: ignore[operator]
        lookup = tied_lookup(model.get_input_embeddings(), head)  # type: ignore[operator]
        self._head_loss = HeadLoss(head, lookup, only_learned=self._conversations)
        if path.more:
            model.loss_function = _made_in_the_head  # type: ignore[assignment]
        return Choice("chunked", f"{path.reason}, so they are made and used a chunk at a time{more}")

    def choices(self, model: Any) -> Mapping[str, Choice[str]]:
        """Whether the documents of a row see each other."""
        choice = documents_of(model, self._section, conversations=self._conversations)
        self._across = choice.value == "joined"
        return {"documents": choice}

    @property
    def needs_head_in_backward(self) -> bool:
        """Whether backward reads the head's weight again (the chunked loss made its gradients in forward)."""
        return self._head_loss is None

    def loss(self, module: nn.Module, batch: Batch, scale: float) -> torch.Tensor:
        """Sum over the batch's valid targets times scale; call backward on it for gradients.

        In training with all the model adds to it; an evaluation, and so the perplexity, is of the next token alone.
        """
        if not self._path.cross_entropy or (self._path.more and module.training):
            return self._own_loss(module, batch, scale)
        if self._head_loss is None:
            return logits_loss(module(**_inputs(batch)).logits, batch.labels, scale)
        self._head_loss.expect(batch.labels, scale)
        result: torch.Tensor = module(**_inputs(batch)).logits
        return result

    def _own_loss(self, module: nn.Module, batch: Batch, scale: float) -> torch.Tensor:
        """As the model's forward gives it: a mean over the valid targets of these rows, and what it adds.

        It counts with the share these targets have in the step, so that a step has the mean of its micro-batches, on
        however many ranks they are. Rows without targets take no part: of a mixture's balance they would be a part.
        """
        valid = (batch.labels[:, 1:] != IGNORED).sum(1)
        targets = int(valid.sum())
        # Fillers only: the pass is made for the other ranks' sake. A mean over nothing would be no number.
        batch = _rows(batch, valid > 0 if targets else torch.arange(len(valid)) == 0)
        labels = batch.labels if targets else batch.input_ids
        if self._head_loss is not None:
            self._head_loss.expect(labels, 1.0 / max(1, targets))
        loss: torch.Tensor = module(**_inputs(batch), labels=labels).loss
        return loss * (targets * scale)

    def metrics(self, mean_loss: float) -> tuple[float]:
        """Perplexity; infinite where it exceeds what a float holds."""
        return (math.exp(mean_loss) if mean_loss < 700 else math.inf,)

    def make_loader(
        self,
        rows: PackedData,
        *,
        seed: int,
        rows_per_step: int,
        micro_batch_rows: int,
        accumulation_steps: int,
        rank: int,
        world_size: int,
    ) -> RowLoader[Batch]:
        return make_loader(
            rows,
            seed=seed,
            rows_per_step=rows_per_step,
            micro_batch_rows=micro_batch_rows,
            accumulation_steps=accumulation_steps,
            rank=rank,
            world_size=world_size,
            attention_across_documents=self._across,
        )

    def evaluation_batches(
        self, rows: PackedData, *, max_rows: int | None, micro_batch_rows: int, rank: int, world_size: int
    ) -> EvaluationBatches[Batch]:
        return evaluation_batches(
            rows,
            max_rows=max_rows,
            micro_batch_rows=micro_batch_rows,
            rank=rank,
            world_size=world_size,
            attention_across_documents=self._across,
        )


def _inputs(batch: Batch) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    return inputs


def _rows(batch: Batch, kept: torch.Tensor) -> Batch:
    return Batch(
        batch.input_ids[kept],
        batch.labels[kept],
        None if batch.position_ids is None else batch.position_ids[kept],
        tuple(row for row, keep in zip(batch.row_ids, kept.tolist(), strict=True) if keep),
    )


def _made_in_the_head(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of a model's loss function, where what the head returned is the loss already."""
    return logits
