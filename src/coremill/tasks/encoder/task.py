"""The half without torch that both tasks of encoders share: samples of any length, a step that counts in them.

What reads and encodes examples, and numpy with it, is imported where it is used: planning imports this module too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from coremill.config.schema import RunConfig
from coremill.data.encoded import EncodedRows
from coremill.errors import InputError
from coremill.plan.types import RowCount, StepCounts
from coremill.tasks.base import SmallerStep, Task
from coremill.tasks.encoder.known_models import require_encoder

if TYPE_CHECKING:
    from coremill.data.encode import AskedLabels
    from coremill.data.examples import ExampleForm
    from coremill.data.packed import Progress


@dataclass(frozen=True)
class EncoderTask(Task[EncodedRows]):
    """A task whose rows are examples, padded by the batch."""

    config: RunConfig

    evaluated_rows: ClassVar[int | None] = None

    @abstractmethod
    def form(self) -> ExampleForm:
        """How rows of the data hold examples."""

    def asked_labels(self) -> AskedLabels | None:
        """What the labels are, where the run file or the model says it."""
        return None

    @property
    def doc_stride(self) -> int:
        """By how much the rows of one example overlap; 0: an example is one row."""
        return 0

    def step_counts(self) -> StepCounts:
        """Samples, of at most so many tokens."""
        train, data = self.config.train, self.config.data
        return StepCounts(
            rows=train.samples_per_step, row_tokens=data.sequence_length, vocabulary_logits=False, rows_differ=True
        )

    def smaller_step(self, rows: EncodedRows) -> SmallerStep | None:
        """All rows once, where a step asks for more."""
        count, asked = rows.train_rows, self.config.train.samples_per_step
        if count >= asked:
            return None
        train = self.config.train.model_copy(update={"samples_per_step": count})
        return SmallerStep(
            self.config.model_copy(update={"train": train}),
            f"there {'is 1 row' if count == 1 else f'are {count:,} rows'}, fewer than the {asked:,} of a step"
            f" (train.samples_per_step): a step takes each once",
        )

    def check_model(self, config: Mapping[str, Any], *, description: str, where: str, trusted: bool) -> None:
        """An encoder that transformers knows for this task."""
        require_encoder(
            config,
            task=self.config.task,
            model_class=self.model_class,
            description=description,
            where=where,
            trusted=trusted,
        )

    def check_data(self, *, max_positions: int | None) -> None:
        """Names, columns, the length of rows, the first row of local files."""
        from coremill.data.encode import check_examples

        check_examples(self.config, self.form(), max_positions=max_positions)

    def make_rows(
        self,
        *,
        tokenizer_folder: Path,
        code_sha256: str | None,
        vocabulary_rows: int,
        max_positions: int | None,
        cache: Path,
        progress: Callable[[Progress], None] | None,
    ) -> EncodedRows:
        """Encoded, from the cache where that was done before."""
        from coremill.data.encode import prepare_examples

        return prepare_examples(
            self.config,
            form=self.form(),
            doc_stride=self.doc_stride,
            asked=self.asked_labels(),
            tokenizer_folder=tokenizer_folder,
            vocabulary_rows=vocabulary_rows,
            max_positions=max_positions,
            cache=cache,
            progress=progress,
            code_sha256=code_sha256,
        )

    def count_rows(
        self,
        *,
        tokenizer_folder: Path | None,
        code_sha256: str | None,
        vocabulary_rows: int,
        max_positions: int | None,
        cache: Path,
        progress: Callable[[Progress], None],
    ) -> RowCount:
        """From the cache, from the examples themselves where these are few, else from a sample of them."""
        from coremill.data.counting_examples import count_examples

        return count_examples(
            self.config,
            form=self.form(),
            doc_stride=self.doc_stride,
            asked=self.asked_labels(),
            tokenizer_folder=tokenizer_folder,
            vocabulary_rows=vocabulary_rows,
            cache=cache,
            progress=progress,
            code_sha256=code_sha256,
        )

    def describe_rows(self, rows: EncodedRows) -> str:
        """With when they were made: this is what the first run waits for, and a later one does not."""
        when = "encoded before, in the cache" if rows.from_cache else "encoded now"
        return f"{rows.train_in_words()}; {when}"

    def check_rows(self, rows: EncodedRows, *, world_size: int) -> None:
        """A row for each rank."""
        if rows.train_rows < world_size:
            raise InputError(
                f"there are {rows.train_rows:,} rows for {world_size:,} ranks",
                where="data.source",
                do="add examples, or train with fewer ranks: --nproc 1",
            )

    @staticmethod
    def rows_from_json(document: Mapping[str, Any]) -> EncodedRows:
        return EncodedRows.from_json(document)
