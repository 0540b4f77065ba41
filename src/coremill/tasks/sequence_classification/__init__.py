"""A class, or a number, for a text or a pair of texts. This half imports no torch; training.py is the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from coremill.config.schema import RunConfig
from coremill.plan.types import StepCounts
from coremill.tasks.base import Metric, Task
from coremill.tasks.encoder.known_models import require_encoder


@dataclass(frozen=True)
class SequenceClassification(Task[Any]):
    """A class, or a number, for a text or a pair of texts; a step counts in samples."""

    config: RunConfig

    model_class: ClassVar[str] = "AutoModelForSequenceClassification"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "higher"),
        Metric("f1", "higher"),
        Metric("pearson", "higher"),
        Metric("spearman", "higher"),
    )
    evaluated_rows: ClassVar[int | None] = None
    training_modules: ClassVar[tuple[str, ...]] = ("coremill.tasks.sequence_classification.training",)

    def step_counts(self) -> StepCounts:
        """Rows of at most so many tokens."""
        train, data = self.config.train, self.config.data
        return StepCounts(rows=train.samples_per_step, row_tokens=data.sequence_length, vocabulary_logits=False)

    def check_model(self, config: Mapping[str, Any], *, description: str, where: str, trusted: bool) -> None:
        require_encoder(
            config,
            task=self.config.task,
            model_class=self.model_class,
            description=description,
            where=where,
            trusted=trusted,
        )
