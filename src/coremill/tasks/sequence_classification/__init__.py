"""A class, or a number, for a text or a pair of texts. This half imports no torch; training.py is the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from coremill.config.task_rules import CLASSIFICATION
from coremill.data.encoded import EncodedRows
from coremill.data.labels import Labels
from coremill.tasks.base import Metric
from coremill.tasks.encoder.task import EncoderTask
from coremill.tasks.sequence_classification.head_labels import labels_of_head

if TYPE_CHECKING:
    from coremill.data.encode import AskedLabels
    from coremill.data.examples import ExampleForm
    from coremill.tasks.sequence_classification.training import ClassificationTraining

_OF_CLASSES = (Metric("accuracy", "higher"), Metric("f1", "higher"))
_OF_NUMBERS = (Metric("pearson", "higher"), Metric("spearman", "higher"))


@dataclass(frozen=True)
class SequenceClassification(EncoderTask):
    """Texts with labels; what the labels are, is said by the run file, by the model's head or by the data."""

    of_head: Labels | None = None  # of the model, where its files have a head

    model_class: ClassVar[str] = "AutoModelForSequenceClassification"
    metrics: ClassVar[tuple[Metric, ...]] = (*_OF_CLASSES, *_OF_NUMBERS)
    training_modules: ClassVar[tuple[str, ...]] = ("coremill.tasks.sequence_classification.training",)

    def on_model(self, config: Mapping[str, Any], *, pretrained: bool) -> Self:
        return replace(self, of_head=labels_of_head(config) if pretrained else None)

    def metrics_on(self, rows: EncodedRows) -> tuple[Metric, ...]:
        assert rows.labels is not None
        return _OF_NUMBERS if rows.labels.kind == "regression" else _OF_CLASSES

    def form(self) -> ExampleForm:
        from coremill.data.examples import labelled_texts

        return labelled_texts(tuple(self.config.data.text_columns), self.config.data.label_column)

    def asked_labels(self) -> AskedLabels | None:
        """As `model.labels` says, else as the head does that the model comes with."""
        from coremill.data.encode import AskedLabels

        named = self.config.model.labels
        if named == "regression":
            return AskedLabels(Labels(kind="regression"), "model.labels")
        if isinstance(named, int):
            return AskedLabels(Labels(kind="classes", count=named), "model.labels")
        if named is not None:
            return AskedLabels(Labels(kind="classes", count=len(named), names=tuple(named)), "model.labels")
        return None if self.of_head is None else AskedLabels(self.of_head, "the model's head")

    def config_changes(self, rows: EncodedRows) -> Mapping[str, Any]:
        """The head's labels; as transformers names them where they have no name."""
        assert rows.labels is not None
        names = rows.labels.names or tuple(f"LABEL_{number}" for number in range(rows.labels.count))
        kind = "regression" if rows.labels.kind == "regression" else "single_label_classification"
        return {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": kind,
        }

    def training(self) -> ClassificationTraining:
        raise NotImplementedError(f"{CLASSIFICATION} trains on rows: training_on")

    def training_on(self, rows: EncodedRows) -> ClassificationTraining:
        from coremill.tasks.sequence_classification.training import ClassificationTraining

        assert rows.labels is not None
        return ClassificationTraining(self.config, rows.labels)
