"""Answers as parts of a text. This half imports no torch; training.py is the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from coremill.data.encoded import EncodedRows
from coremill.tasks.base import Metric, ShownRow, evaluated_rows
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

    def shown_rows(self, rows: EncodedRows, *, count: int, evaluation: bool) -> Sequence[ShownRow]:
        """With the tokens of the answer as what is learned."""
        from coremill.tasks.encoder.shown import encoded_rows_shown
        from coremill.tasks.question_answering.scoring import learned_of_window, rows_of_whole_questions

        return encoded_rows_shown(
            self.config,
            rows,
            learned_of_window,
            lambda split: rows_of_whole_questions(split.row_examples, evaluated_rows(self.config)),
            count=count,
            evaluation=evaluation,
        )

    def sample(
        self, export: Path, rows: EncodedRows, environ: Mapping[str, str], *, code_sha256: str | None
    ) -> Mapping[str, str] | None:
        """The answer to `sample.prompt` in `sample.context`."""
        from coremill.tasks.encoder.sample import ask_for_sample
        from coremill.tasks.question_answering.scoring import rules_of

        sample = self.config.sample
        if sample.prompt is None:
            return None
        asked = {
            "prompt": sample.prompt,
            "context": sample.context,
            "length": rows.sequence_length,
            "stride": self.doc_stride,
            "rules": asdict(rules_of(rows, self.config.evaluation)),
        }
        program = "coremill.tasks.question_answering.sample"
        return ask_for_sample(program, export, asked, environ, code_sha256=code_sha256)

    def training(self) -> QuestionAnsweringTraining:
        from coremill.tasks.question_answering.training import QuestionAnsweringTraining

        return QuestionAnsweringTraining(self.config)
