"""Examples for encoders in rows of data: texts with a label, or a question with its context and answers.

Which columns hold what is said by the run file; nothing is guessed. questions.py reads questions, labels.py makes
classes of labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coremill.data.conversations import DROP, checked_text
from coremill.data.questions import IMPOSSIBLE_COLUMN, Question, question_of
from coremill.errors import InputError

Label = str | int | float | bool


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One text or two, and what to say of them."""

    texts: tuple[str, ...]
    label: Label


Example = LabelledText | Question


@dataclass(frozen=True, kw_only=True)
class ExampleForm:
    """How rows hold examples."""

    kind: Literal["labelled texts", "questions"]
    columns: tuple[str, ...]  # that every row has: texts and label; question, context and answers
    settings: tuple[str, ...]  # the key of the run file that names each of them
    id_column: str | None = None  # of questions, where there is one

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read where they are there."""
        return () if self.id_column is None else (self.id_column, IMPOSSIBLE_COLUMN)

    @property
    def identity(self) -> tuple[str, ...]:
        """What the examples depend on, for a cache key."""
        return (self.kind, *self.columns, self.id_column or "")

    def in_words(self) -> str:
        names = [f"'{column}'" for column in self.columns]
        return f"columns {', '.join(names[:-1])} and {names[-1]}"

    def cure_of_missing(self, column: str) -> str:
        """What to do where there is no such column."""
        setting = self.settings[self.columns.index(column)]
        holds = {
            "data.text_columns": "set data.text_columns to the one or two that hold the texts",
            "data.label_column": "set data.label_column to the one that holds the labels",
            "data.answers_column": "set data.answers_column to the one that holds the answers (text and answer_start);"
            " without answers there is nothing to learn or to compare with",
        }
        return holds.get(setting, f"set {setting} to the one that holds the {setting[5:-7]}")

    def read(self, values: Mapping[str, Any], where: str, row: int) -> Example:
        """The example of a row; InputError where it cannot be used."""
        if self.kind == "questions":
            assert self.id_column is not None
            return question_of(values, self.columns, self.id_column, where, row)
        *text_columns, label_column = self.columns
        texts = tuple(_text_of(values[column], column, where) for column in text_columns)
        if not any(text.strip() for text in texts):
            names = " and ".join(f"'{column}'" for column in text_columns)
            raise InputError(f"there is no text in {names}", where=where, do=DROP)
        return LabelledText(texts, _label_of(values[label_column], label_column, where))


def labelled_texts(text_columns: tuple[str, ...], label_column: str) -> ExampleForm:
    """One column of text or two, and the labels."""
    settings = (*("data.text_columns" for _ in text_columns), "data.label_column")
    return ExampleForm(kind="labelled texts", columns=(*text_columns, label_column), settings=settings)


def questions_of(*, question: str, context: str, answers: str, id_column: str) -> ExampleForm:
    """The form of SQuAD, by the names of its columns."""
    settings = ("data.question_column", "data.context_column", "data.answers_column")
    return ExampleForm(kind="questions", columns=(question, context, answers), settings=settings, id_column=id_column)


def _text_of(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        what = f"column '{column}' holds no text" if value is not None else f"there is no text in column '{column}'"
        do = f"name a column of text in data.text_columns, or {DROP}"
        raise InputError(what, where=where, why=f"its value is {value!r:.60}", do=do)
    return checked_text(value, f"column '{column}'", where)


def _label_of(value: Any, column: str, where: str) -> Label:
    if value is None or (isinstance(value, str) and not value.strip()):
        do = f"label it, or {DROP}"
        raise InputError(f"the row has no label (column '{column}')", where=where, do=do)
    if isinstance(value, float) and not math.isfinite(value):
        why = "pandas writes NaN where a value is missing" if math.isnan(value) else None
        raise InputError(f"the label is no number: {value}", where=where, why=why, do=f"label it, or {DROP}")
    if not isinstance(value, str | int | float | bool):
        what = f"column '{column}' holds no label"
        why = f"its value is {value!r:.60}; a label is a number or a name"
        raise InputError(what, where=where, why=why, do="set data.label_column to the one that holds the labels")
    return checked_text(value, f"column '{column}'", where) if isinstance(value, str) else value
