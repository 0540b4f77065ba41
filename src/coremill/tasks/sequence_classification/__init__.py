"""A class, or a number, for a text or a pair of texts. This half imports no torch; training.py is the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from coremill.config.task_rules import CLASSIFICATION
from coremill.data.encoded import EncodedRows
from coremill.data.labels import OF_HEAD, Labels
from coremill.tasks.base import Metric, ShownRow, evaluated_rows
from coremill.tasks.encoder.task import EncoderTask
from coremill.tasks.sequence_classification.head_labels import labels_of_head, refuse_other_order

if TYPE_CHECKING:
    from coremill.data.encode import AskedLabels
    from coremill.data.encoded_split import EncodedSplit
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
            if self.of_head is not None:
                refuse_other_order(named, self.of_head)
            return AskedLabels(Labels(kind="classes", count=len(named), names=tuple(named)), "model.labels")
        return None if self.of_head is None else AskedLabels(self.of_head, OF_HEAD)

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

    def shown_rows(self, rows: EncodedRows, *, count: int, evaluation: bool) -> Sequence[ShownRow]:
        """With their labels; no token of a text is learned."""
        from coremill.data.loader import evaluation_row_ids
        from coremill.tasks.encoder.shown import encoded_rows_shown
        from coremill.tasks.sequence_classification.scoring import label_in_words

        def label(split: EncodedSplit, row: int) -> tuple[tuple[bool, ...], str]:
            return (False,) * int(split.lengths[row]), label_in_words(rows, split, row)

        return encoded_rows_shown(
            self.config,
            rows,
            label,
            lambda split: evaluation_row_ids(split.count, evaluated_rows(self.config)),
            count=count,
            evaluation=evaluation,
        )

    def sample(
        self, export: Path, rows: EncodedRows, environ: Mapping[str, str], *, code_sha256: str | None
    ) -> Mapping[str, str] | None:
        """The class or number of `sample.prompt`."""
        from coremill.tasks.encoder.sample import ask_for_sample

        sample = self.config.sample
        if sample.prompt is None:
            return None
        names = list(self.config_changes(rows)["id2label"].values())
        asked = {"prompt": sample.prompt, "context": sample.context, "names": names, "length": rows.sequence_length}
        program = "coremill.tasks.sequence_classification.sample"
        return ask_for_sample(program, export, asked, environ, code_sha256=code_sha256)

    def training(self) -> ClassificationTraining:
        raise NotImplementedError(f"{CLASSIFICATION} trains on rows: training_on")

    def training_on(self, rows: EncodedRows) -> ClassificationTraining:
        from coremill.tasks.sequence_classification.training import ClassificationTraining

        assert rows.labels is not None
        return ClassificationTraining(self.config, rows.labels)
