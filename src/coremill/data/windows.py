"""Windows over the context of a question: rows of at most so many tokens, neighbours sharing `doc_stride` of them.

The question stands in every window, whole; only the context is cut. Around both stands what the tokenizer puts around a
pair. A context is encoded once for all questions of a batch that share it: SQuAD has five for each. An answer that is
not whole inside a window, and no answer at all, is the token that stands for none (CLS).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from coremill.data.pair_tokenizer import PairTokenizer
from coremill.data.questions import Answer, Question
from coremill.errors import InputError

NOWHERE = -1  # offset of a token that is not of the context

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Window:
    """One row of a question."""

    ids: Ids
    types: npt.NDArray[np.uint8]
    offsets: Offsets  # [tokens, 2] in characters of the context; NOWHERE
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
        # Some questions of SQuAD have blanks in front, which run_qa leaves out too.
        asked = self._backend.encode_batch_fast(
            [question.question.lstrip() for question in questions], add_special_tokens=False
        )
        contexts = self._encoded({question.context for question in questions})
        for question, encoding in zip(questions, asked, strict=True):
            room = self._length - self._layout.special - len(encoding)
            if room > self._stride:
                yield list(self._windows(encoding.ids, *contexts[question.context], room, question.answers))
            else:
                yield self._too_long(len(encoding), room)

    def _encoded(self, contexts: set[str]) -> dict[str, tuple[Ids, Offsets]]:
        texts = list(contexts)
        found = {}
        for text, encoding in zip(texts, self._backend.encode_batch(texts, add_special_tokens=False), strict=True):
            ids = np.array(encoding.ids, dtype=np.uint32)
            offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int32, 2 * len(ids)).reshape(-1, 2)
            found[text] = ids, offsets
        return found

    def _windows(
        self, question: Sequence[int], context: Ids, offsets: Offsets, room: int, answers: Sequence[Answer]
    ) -> Iterator[Window]:
        layout = self._layout
        before = np.array([*layout.before.ids, *question, *layout.between.ids], dtype=np.uint32)
        behind = np.array(layout.behind.ids, dtype=np.uint32)
        types_before = [*layout.before.types, *[layout.first_type] * len(question), *layout.between.types]
        place = answer_tokens(offsets, answers[0]) if answers else None  # to learn from the first, as run_qa does
        for first in range(0, max(1, len(context) - self._stride), room - self._stride):
            part = context[first : first + room]
            ids = np.concatenate([before, part, behind])
            types = np.full(len(ids), layout.second_type, dtype=np.uint8)
            types[: len(before)] = types_before
            types[len(before) + len(part) :] = layout.behind.types
            stretches = np.full((len(ids), 2), NOWHERE, dtype=np.int32)
            stretches[len(before) : len(before) + len(part)] = offsets[first : first + room]
            start = end = layout.null_position
            if place is not None and first <= place[0] and place[1] < first + len(part):
                start, end = (len(before) + token - first for token in place)
            yield Window(ids, types, stretches, start, end)

    def _too_long(self, question_tokens: int, room: int) -> InputError:
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


def answer_tokens(offsets: Offsets, answer: Answer) -> tuple[int, int] | None:
    """The context tokens that an answer begins and ends with; None where no token stands for it.

    As run_qa finds them, but for a character of several tokens (an emoji, by bytes): there all of them belong to it.
    """
    stripped = answer.text.strip()  # blanks belong to no token
    first = answer.start + len(answer.text) - len(answer.text.lstrip())
    start = int(np.searchsorted(offsets[:, 0], first, side="right")) - 1
    end = int(np.searchsorted(offsets[:, 1], first + len(stripped), side="left"))
    if start < 0 or end >= len(offsets):
        return None
    while start > 0 and (offsets[start - 1] == offsets[start]).all():
        start -= 1
    while end + 1 < len(offsets) and (offsets[end + 1] == offsets[end]).all():
        end += 1
    return (start, end) if start <= end else None
