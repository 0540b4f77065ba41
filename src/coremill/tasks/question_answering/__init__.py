"""Answers as parts of a text. This half imports no torch; training.py is the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from coremill.tasks.base import Metric
from coremill.tasks.encoder.task import EncoderTask

if TYPE_CHECKING:
    from coremill.data.examples import ExampleForm
    from coremill.tasks.question_answering.training import QuestionAnsweringTraining


@dataclass(frozen=True)
class QuestionAnswering(EncoderTask):
    """Questions on contexts, cut into windows that overlap; a row is a window."""

    model_class: ClassVar[str] = "AutoModelForQuestionAnswering"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("f1", "higher"), Metric("exact_match", "higher"))
    training_modules: ClassVar[tuple[str, ...]] = ("coremill.tasks.question_answering.training",)

    def form(self) -> ExampleForm:
        from coremill.data.examples import questions_of

        data = self.config.data
        return questions_of(
            question=data.question_column,
            context=data.context_column,
            answers=data.answers_column,
            id_column=data.id_column,
        )

    @property
    def doc_stride(self) -> int:
        return self.config.data.doc_stride

    def training(self) -> QuestionAnsweringTraining:
        from coremill.tasks.question_answering.training import QuestionAnsweringTraining

        return QuestionAnsweringTraining(self.config)
