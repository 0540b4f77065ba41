"""Causal language modelling: the next token of packed rows. This half imports no torch; training.py is the other.

It is imported to plan, too: what reads and tokenises text, and numpy with it, is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from coremill.config.schema import RunConfig
from coremill.data.packed import PackedData, Progress
from coremill.plan.types import RowCount, StepCounts
from coremill.tasks.base import Metric, ShownRow, SmallerStep, Task
from coremill.tasks.causal_lm.known_models import MODEL_CLASS, require_causal

if TYPE_CHECKING:
    from coremill.tasks.causal_lm.training import CausalLmTraining


@dataclass(frozen=True)
class CausalLm(Task[PackedData]):
    """Text is tokenised and packed into rows of one length; a step counts in tokens."""

    config: RunConfig

    model_class: ClassVar[str] = MODEL_CLASS
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("perplexity", "lower"),)
    training_modules: ClassVar[tuple[str, ...]] = ("coremill.tasks.causal_lm.training",)

    def step_counts(self) -> StepCounts:
        """As many whole rows as the tokens of a step fill."""
        length = self.config.data.sequence_length
        return StepCounts(rows=self.config.train.tokens_per_step // length, row_tokens=length, vocabulary_logits=True)

    def smaller_step(self, rows: PackedData) -> SmallerStep | None:
        count, asked, tokens = rows.train_rows, self.step_counts().rows, self.config.train.tokens_per_step
        if count >= asked:
            return None
        smaller = count * rows.sequence_length
        train = self.config.train.model_copy(update={"tokens_per_step": smaller})
        what = "text fills" if rows.conversations is None else "conversations fill"
        return SmallerStep(
            self.config.model_copy(update={"train": train}),
            f"the {what} {count:,} row{'s' if count != 1 else ''}, fewer than the {asked:,} of a step"
            f" (train.tokens_per_step {tokens:,}): a step takes {'as many' if rows.sources else 'each once'},"
            f" {smaller:,} tokens",
        )

    def check_model(self, config: Mapping[str, Any], *, description: str, where: str, trusted: bool) -> None:
        require_causal(config, description=description, where=where, trusted=trusted)

    def check_data(self, *, max_positions: int | None) -> None:
        """Names, the length of rows, the first row of local files."""
        from coremill.data.tokenise import check_sources

        check_sources(self.config.data, max_positions=max_positions)

    def make_rows(
        self,
        *,
        tokenizer_folder: Path,
        code_sha256: str | None,
        vocabulary_rows: int,
        max_positions: int | None,
        cache: Path,
        progress: Callable[[Progress], None] | None,
    ) -> PackedData:
        """Tokenised and packed, from the cache where that was done before."""
        from coremill.data.tokenise import prepare_data

        return prepare_data(
            self.config,
            tokenizer_folder=tokenizer_folder,
            code_sha256=code_sha256,
            vocabulary_rows=vocabulary_rows,
            max_positions=max_positions,
            cache=cache,
            progress=progress,
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
        """From the cache, from the text itself where it is small, else from a sample of it."""
        from coremill.data.counting import count_rows

        return count_rows(
            self.config,
            tokenizer_folder=tokenizer_folder,
            code_sha256=code_sha256,
            vocabulary_rows=vocabulary_rows,
            cache=cache,
            progress=progress,
        )

    def describe_rows(self, rows: PackedData) -> str:
        """With when they were made: this is what the first run waits for, and a later one does not."""
        when = "tokenised before, in the cache" if rows.from_cache else "tokenised now"
        return f"{rows.train_in_words()}; {when}"

    def check_rows(self, rows: PackedData, *, world_size: int) -> None:
        from coremill.data.tokenise import require_rows_for_ranks

        require_rows_for_ranks(rows, world_size)

    def shown_rows(self, rows: PackedData, *, count: int, evaluation: bool) -> Sequence[ShownRow]:
        """In the order of the run; an evaluation's as it takes them."""
        from coremill.tasks.causal_lm.shown import packed_rows_shown

        return packed_rows_shown(self.config, rows, count=count, evaluation=evaluation)

    @staticmethod
    def rows_from_json(document: Mapping[str, Any]) -> PackedData:
        return PackedData.from_json(document)

    def sample(
        self, export: Path, rows: PackedData, environ: Mapping[str, str], *, code_sha256: str | None
    ) -> Mapping[str, str] | None:
        """A completion of `sample.prompt`, which begins as the documents of the training did; where these were
        conversations, an answer to it."""
        from coremill.tasks.causal_lm.sample import ask_for_sample  # which is a program of its own too

        if self.config.sample.prompt is None:
            return None
        chat_end_ids = None if rows.conversations is None else rows.conversations.end_ids
        return ask_for_sample(
            export,
            self.config.sample,
            environ,
            begin_ids=rows.begin_ids,
            chat_end_ids=chat_end_ids,
            code_sha256=code_sha256,
        )

    def training(self) -> CausalLmTraining:
        from coremill.tasks.causal_lm.training import CausalLmTraining

        return CausalLmTraining(self.config.data)

    def training_on(self, rows: PackedData) -> CausalLmTraining:
        from coremill.tasks.causal_lm.training import CausalLmTraining

        return CausalLmTraining(self.config.data, conversations=rows.conversations is not None)
