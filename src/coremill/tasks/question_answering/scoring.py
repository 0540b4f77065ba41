"""What the logits of an evaluation come to: exact match, F1, and the files of predictions. Without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coremill.config.schema import EvaluationSection
from coremill.data.encoded import EncodedRows
from coremill.data.encoded_split import EncodedSplit
from coremill.data.order import Positions
from coremill.tasks.base import RowOutput, Scored
from coremill.tasks.question_answering.post_processing import AnswerRules, documents, predict
from coremill.tasks.question_answering.squad_metrics import squad_scores


def rows_of_whole_questions(row_examples: npt.NDArray[np.int64], max_rows: int | None) -> Positions:
    """All windows of as many questions, spread evenly, as have at most so many windows; at least one question's."""
    if max_rows is None or max_rows >= len(row_examples):
        return np.arange(len(row_examples), dtype=np.int64)
    windows = np.bincount(row_examples)
    # Fewer questions have fewer windows, but not always by much: the largest number that fits is searched for.
    low, high = 1, len(windows)
    while low < high:
        middle = (low + high + 1) // 2
        if windows[_spread(len(windows), middle)].sum() <= max_rows:
            low = middle
        else:
            high = middle - 1
    chosen = np.zeros(len(windows), dtype=bool)
    chosen[_spread(len(windows), low)] = True
    return np.flatnonzero(chosen[row_examples])


def _spread(count: int, wanted: int) -> Positions:
    return np.arange(wanted, dtype=np.int64) * count // wanted


def rules_of(rows: EncodedRows, settings: EvaluationSection) -> AnswerRules:
    """No answer is one where the data has questions without any."""
    return AnswerRules(
        n_best=settings.n_best,
        max_answer_tokens=settings.max_answer_tokens,
        null_threshold=settings.null_threshold,
        version_2=rows.unanswerable > 0,
    )


def learned_of_window(split: EncodedSplit, row: int) -> tuple[tuple[bool, ...], str]:
    """Which tokens are the answer, and which window of which question this is."""
    first, last = (int(split.targets[name][row]) for name in ("start_positions", "end_positions"))
    windows = np.flatnonzero(split.row_examples == split.row_examples[row])
    (question,) = split.questions_of(split.row_examples[[row]])
    words = f"window {int(np.searchsorted(windows, row)) + 1} of {len(windows)} of question {question.id}"
    if first == split.null_position:
        words += ", whose answer is not in it" if question.answers else ", which has no answer"
    return tuple(first <= at <= last for at in range(int(split.lengths[row]))), words


def score_windows(
    rows: EncodedRows, row_ids: Sequence[int], outputs: Sequence[RowOutput], settings: EvaluationSection
) -> Scored:
    """Of these windows of the evaluation: each output is the logits of its starts, then of its ends."""
    split = EncodedSplit(rows, "evaluation")
    rules = rules_of(rows, settings)
    width = max(len(output) // 2 for output in outputs)
    logits = np.zeros((2, len(outputs), width), dtype=np.float32)
    for at, output in enumerate(outputs):
        logits[:, at, : len(output) // 2] = output.reshape(2, -1)
    answers = predict(split, np.array(row_ids, dtype=np.int64), logits[0], logits[1], rules)
    right = [question.answers for question in split.questions_of(np.unique(split.row_examples[list(row_ids)]))]
    scores = squad_scores([each.text for each in answers], right, version_2=rules.version_2)
    texts = {name: json.dumps(each, indent=1, ensure_ascii=False) + "\n" for name, each in documents(answers).items()}
    return Scored({"f1": scores.f1, "exact_match": scores.exact_match}, texts)
