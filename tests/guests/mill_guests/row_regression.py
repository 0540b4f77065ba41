"""A made-up task: a number for a row of tokens. This half imports no torch; row_regression_training.py is the other.

{"tokens": [5, 1, 7, 2], "target": 0.3}     a line of the files in data.source: data.sequence_length tokens each
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from coremill.config.schema import RunConfig
from coremill.data.packed import Progress
from coremill.errors import InputError
from coremill.plan.types import StepCounts
from coremill.tasks.base import Metric, SmallerStep, Task

if TYPE_CHECKING:
    from mill_guests.row_regression_training import RowRegressionTraining


@dataclass(frozen=True, kw_only=True)
class RegressionRows:
    """Rows in one file, tokens and targets; those to evaluate on are the last."""

    file: Path
    key: str
    train_rows: int
    evaluation_rows: int
    row_tokens: int

    bad_rows_words: ClassVar[str] = ""
    evaluation_words: ClassVar[str] = ""

    def counts(self) -> dict[str, Any]:
        """The fields of the event `data`."""
        rows = self.train_rows + self.evaluation_rows
        return {
            "train_rows": self.train_rows,
            "evaluation_rows": self.evaluation_rows,
            "tokens": rows * self.row_tokens,
        }

    def files(self) -> list[Path]:
        """What hosts must have alike."""
        return [self.file]

    def in_words(self) -> str:
        """How much there is."""
        return f"{self.train_rows:,} rows to train and {self.evaluation_rows:,} to evaluate on"

    def explain_change(self, config: RunConfig, earlier: Mapping[str, Any], *, what: str, anew: str) -> InputError:
        """Rows are named by what is in them."""
        return InputError(what, where="data", why="rows or targets have changed since", do=anew)

    def to_json(self) -> dict[str, Any]:
        """For handing to a rank."""
        return {**asdict(self), "file": str(self.file)}


@dataclass(frozen=True)
class RowRegression(Task[RegressionRows]):
    """Mean squared error of one number for each row."""

    config: RunConfig

    model_class: ClassVar[str] = "AutoModelForSequenceClassification"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("rmse", "lower"),)
    training_modules: ClassVar[tuple[str, ...]] = ("mill_guests.row_regression_training",)

    def step_counts(self) -> StepCounts:
        """Of each row only one number is asked."""
        length = self.config.data.sequence_length
        return StepCounts(rows=self.config.train.tokens_per_step // length, row_tokens=length, vocabulary_logits=False)

    def smaller_step(self, rows: RegressionRows) -> SmallerStep | None:
        """Too few rows are refused instead."""
        return None

    def check_model(self, config: Mapping[str, Any], *, description: str, where: str, trusted: bool) -> None:
        """It gives one number, and knows where a row ends."""
        if len(config.get("id2label", ())) != 1 or config.get("pad_token_id") is None:
            raise InputError(
                f"{description} does not give one number for a row",
                where=where,
                do='set "id2label": {"0": "target"} and a pad_token_id in it',
            )

    def check_data(self, *, max_positions: int | None) -> None:
        """There are files."""
        if not self._sources():
            raise InputError(f"no file matches {self.config.data.source}", where="data.source", do="name a .jsonl file")

    def make_rows(
        self,
        *,
        tokenizer_folder: Path,
        code_sha256: str | None,
        vocabulary_rows: int,
        max_positions: int | None,
        cache: Path,
        progress: Callable[[Progress], None] | None,
    ) -> RegressionRows:
        """Read every time: there are few."""
        length, lines = self.config.data.sequence_length, []
        for source in self._sources():
            lines += [json.loads(line) for line in source.read_text().splitlines()]
        if any(len(line["tokens"]) != length or max(line["tokens"]) >= vocabulary_rows for line in lines):
            raise InputError(f"not all rows have {length} tokens that the model knows", where="data.sequence_length")
        tokens = np.array([line["tokens"] for line in lines], dtype=np.int64)
        targets = np.array([line["target"] for line in lines], dtype=np.float32)
        held_out = int(len(lines) * self.config.data.evaluation_fraction)
        key = hashlib.sha256(tokens.tobytes() + targets.tobytes() + str(held_out).encode()).hexdigest()
        file = cache / "row-regression" / f"{key[:16]}.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, tokens=tokens, targets=targets)
        return RegressionRows(
            file=file,
            key=key,
            train_rows=len(lines) - held_out,
            evaluation_rows=held_out,
            row_tokens=length,
        )

    def check_rows(self, rows: RegressionRows, *, world_size: int) -> None:
        """A step holds no row twice."""
        if rows.train_rows < self.step_counts().rows:
            raise InputError(f"a step has more rows than there are: {rows.train_rows}", where="train.tokens_per_step")

    @staticmethod
    def rows_from_json(document: Mapping[str, Any]) -> RegressionRows:
        """As `RegressionRows.to_json` left them."""
        return RegressionRows(
            file=Path(document["file"]),
            key=document["key"],
            train_rows=document["train_rows"],
            evaluation_rows=document["evaluation_rows"],
            row_tokens=document["row_tokens"],
        )

    def sample(
        self, export: Path, rows: RegressionRows, environ: Mapping[str, str], *, code_sha256: str | None
    ) -> Mapping[str, str] | None:
        """A number is nothing to look at."""
        return None

    def training(self) -> RowRegressionTraining:
        """Imports torch."""
        from mill_guests.row_regression_training import RowRegressionTraining

        return RowRegressionTraining()

    def _sources(self) -> list[Path]:
        return [Path(path) for path in sorted(glob.glob(self.config.data.source))]
