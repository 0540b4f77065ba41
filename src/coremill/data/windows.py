"""Windows over the context of a question: rows of at most so many tokens, neighbours sharing `doc_stride` of them.

The question stands in every window, whole; only the context is cut, by the tokenizer's own truncation. An answer that
is not whole inside a window, and no answer at all, is the token that stands for none (CLS).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from coremill.data.pair_tokenizer import PairTokenizer
from coremill.data.questions import Answer, Question
from coremill.errors import InputError

NOWHERE = -1  # offset of a token that is not of the context


@dataclass(frozen=True, slots=True)
class Window:
    """One row of a question."""

    ids: list[int]
    types: list[int]
    offsets: npt.NDArray[np.int32]  # [tokens, 2] in characters of the context; NOWHERE
    start: int  # the tokens that the answer begins and ends with
    end: int


class Windows:
    """Makes them, batch by batch."""

    def __init__(self, tokenizer: PairTokenizer, *, sequence_length: int, doc_stride: int) -> None:
        self._backend, self._layout = tokenizer.backend, tokenizer.pair_layout()
        self._length, self._stride = sequence_length, doc_stride
        self.null_position = self._layout.null_position
        self._require_room()

    def of(self, questions: Sequence[Question]) -> Iterator[list[Window] | InputError]:
        """The windows of each question, or why it has none."""
        # A question with blanks in front, of which there are a few in SQuAD, would waste tokens on them.
        asked = [question.question.lstrip() for question in questions]
        self._backend.no_truncation()
        lengths = [len(each) for each in self._backend.encode_batch_fast(asked, add_special_tokens=False)]
        problems = [self._too_long(length) for length in lengths]
        fitting = [at for at, problem in enumerate(problems) if problem is None]
        # The library takes the whole process down where a window does not hold the stride, so this comes after.
        self._backend.enable_truncation(self._length, stride=self._stride, strategy="only_second")
        pairs = [(asked[at], questions[at].context) for at in fitting]
        encodings = dict(zip(fitting, self._backend.encode_batch(pairs), strict=True))
        for at, question in enumerate(questions):
            if (problem := problems[at]) is not None:
                yield problem
                continue
            first = encodings.pop(at)
            made = [self._window(each, lengths[at], question.answers) for each in (first, *first.overflowing)]
            yield made

    def _window(self, encoding: Any, question_tokens: int, answers: Sequence[Answer]) -> Window:
        ids, layout = encoding.ids, self._layout
        offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int32, 2 * len(ids)).reshape(-1, 2)
        first = layout.before + question_tokens + layout.between
        last = len(ids) - layout.behind
        offsets[:first] = offsets[last:] = NOWHERE
        start = end = layout.null_position
        if answers:  # to learn from the first, as SQuAD's for training have only one
            found = answer_tokens(offsets[first:last], answers[0])
            if found is not None:
                start, end = first + found[0], first + found[1]
        return Window(ids, encoding.type_ids, offsets, start, end)

    def _too_long(self, question_tokens: int) -> InputError | None:
        room = self._length - self._layout.special - question_tokens
        if room > self._stride:
            return None
        return InputError(
            "the question is too long",
            why=f"its {question_tokens:,} tokens leave {max(0, room):,} of data.sequence_length {self._length:,} for"
            f" the context, and windows share data.doc_stride {self._stride:,}",
            do="shorten it, set data.sequence_length higher or data.doc_stride lower",
        )

    def _require_room(self) -> None:
        if self._length - self._layout.special <= self._stride:
            raise InputError(
                "data.doc_stride must be below data.sequence_length, with room for a question",
                where=f"data.doc_stride: {self._stride}",
                why=f"neighbouring windows of {self._length} tokens share so many of the context, and each has"
                f" {self._layout.special} special tokens and the question besides",
                do=f"set data.doc_stride to {self._length // 3}, as 128 of 384 is",
            )


def answer_tokens(offsets: npt.NDArray[np.int32], answer: Answer) -> tuple[int, int] | None:
    """The context tokens that an answer begins and ends with; None where it is not whole among them."""
    stripped = answer.text.strip()  # blanks belong to no token
    first = answer.start + len(answer.text) - len(answer.text.lstrip())
    last = first + len(stripped)
    if len(offsets) == 0 or offsets[0, 0] > first or offsets[-1, 1] < last:
        return None
    start = int(np.searchsorted(offsets[:, 0], first, side="right")) - 1
    end = int(np.searchsorted(offsets[:, 1], last, side="left"))
    return start, max(start, end)
