"""What a model says of the windows of a question to one answer, by the rules of transformers' run_qa example.

In each window the n best starts and the n best ends are paired: those that lie in the context, end behind their start
and are not too long. The n best pairs of all windows, by the sum of their logits, are the candidates. Where questions
may have no answer, none is a candidate too: its score is that of the token that stands for it (CLS), the lowest of all
windows; it is given where it is above the best answer's by more than a threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coremill.data.encoded_split import AskedQuestion, EncodedSplit
from coremill.data.order import Positions

PREDICTIONS_FILE = "predictions.json"
N_BEST_FILE = "nbest_predictions.json"
NULL_ODDS_FILE = "null_odds.json"

Logits = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class AnswerRules:
    """How an answer is chosen."""

    n_best: int = 20
    max_answer_tokens: int = 30
    null_threshold: float = 0.0
    version_2: bool = False  # a question may have no answer


@dataclass(frozen=True)
class ScoredWindow:
    """What the model says of one window; one entry per token, without padding."""

    offsets: npt.NDArray[np.int32]  # [tokens, 2] in characters of the context; -1: not of it
    start_logits: Logits
    end_logits: Logits
    null_position: int = 0


@dataclass(frozen=True)
class Candidate:
    """A possible answer."""

    text: str
    start_logit: float
    end_logit: float
    probability: float  # among the candidates


@dataclass(frozen=True)
class Prediction:
    """The answer to a question."""

    id: str
    text: str  # empty: none
    candidates: tuple[Candidate, ...]  # the best first
    null_odds: float | None  # by how much no answer is above the best one; None: every question has one


def predict(
    split: EncodedSplit, row_ids: Positions, start_logits: Logits, end_logits: Logits, rules: AnswerRules
) -> list[Prediction]:
    """Answers to all questions that have windows among `row_ids`, in whatever order these come; by their numbers.

    Logits are [windows, width], the tokens of a window first; what is behind its length is not looked at.
    """
    windows: dict[int, list[ScoredWindow]] = {}
    for at in np.argsort(row_ids, kind="stable").tolist():
        row, length = int(row_ids[at]), int(split.lengths[row_ids[at]])
        window = ScoredWindow(
            split.offsets(row), start_logits[at, :length], end_logits[at, :length], split.null_position
        )
        windows.setdefault(int(split.row_examples[row]), []).append(window)
    questions = enumerate(split.questions())
    return [answer(question, windows[number], rules) for number, question in questions if number in windows]


def answer(question: AskedQuestion, windows: Sequence[ScoredWindow], rules: AnswerRules) -> Prediction:
    """The answer of one question."""
    null = min((_null(window) for window in windows), key=lambda span: span.score)
    best = _best_spans(windows, rules)
    if rules.version_2:
        best = sorted([*best, null], key=lambda span: -span.score)[: rules.n_best]
        best += [] if null in best else [null]
    candidates = _with_probabilities(best, question.context)
    first = next((each for each in candidates if each.text), None)
    text, odds = first.text if first is not None else "", None
    if rules.version_2:
        odds = null.score - (first.start_logit + first.end_logit if first is not None else 0.0)
        text = "" if odds > rules.null_threshold else text
    return Prediction(question.id, text, candidates, odds)


def documents(predictions: Iterable[Prediction]) -> dict[str, dict[str, Any]]:
    """The files that a run leaves of them, by name."""
    found: dict[str, dict[str, Any]] = {PREDICTIONS_FILE: {}, N_BEST_FILE: {}}
    for each in predictions:
        found[PREDICTIONS_FILE][each.id] = each.text
        found[N_BEST_FILE][each.id] = [vars_of(candidate) for candidate in each.candidates]
        if each.null_odds is not None:
            found.setdefault(NULL_ODDS_FILE, {})[each.id] = each.null_odds
    return found


def vars_of(candidate: Candidate) -> dict[str, Any]:
    return {
        "text": candidate.text,
        "probability": candidate.probability,
        "start_logit": candidate.start_logit,
        "end_logit": candidate.end_logit,
    }


@dataclass(frozen=True)
class _Span:
    first: int  # character
    last: int
    start_logit: float
    end_logit: float
    score: float


def _best_spans(windows: Sequence[ScoredWindow], rules: AnswerRules) -> list[_Span]:
    """The best pairs of all windows; of equal scores those of an earlier window, start and end come first."""
    columns = [np.concatenate(values) for values in zip(*(_pairs(window, rules) for window in windows), strict=True)]
    scores, firsts, lasts, start_logits, end_logits = columns
    best = _best(scores, rules.n_best)
    chosen = (column[best].tolist() for column in (firsts, lasts, start_logits, end_logits, scores))
    return [_Span(*values) for values in zip(*chosen, strict=True)]


def _pairs(window: ScoredWindow, rules: AnswerRules) -> tuple[npt.NDArray[Any], ...]:
    """Of the best starts and ends: scores, first and last characters, both logits."""
    starts, ends = (_best(logits, rules.n_best) for logits in (window.start_logits, window.end_logits))
    tokens = ends[None, :] - starts[:, None] + 1
    fits = (tokens >= 1) & (tokens <= rules.max_answer_tokens)
    in_context = window.offsets[:, 0] >= 0
    fits &= in_context[starts][:, None] & in_context[ends][None, :]
    rows, places = np.nonzero(fits)
    start_logits, end_logits = window.start_logits[starts[rows]], window.end_logits[ends[places]]
    firsts, lasts = window.offsets[starts[rows], 0], window.offsets[ends[places], 1]
    return start_logits + end_logits, firsts, lasts, start_logits, end_logits


def _null(window: ScoredWindow) -> _Span:
    start, end = window.start_logits[window.null_position], window.end_logits[window.null_position]
    return _Span(0, 0, float(start), float(end), float(start + end))


def _best(logits: Logits, count: int) -> Positions:
    return np.argsort(-logits, kind="stable")[:count]


def _with_probabilities(spans: Sequence[_Span], context: str) -> tuple[Candidate, ...]:
    if not spans:
        return ()
    scores = np.array([span.score for span in spans], dtype=np.float64)
    odds = np.exp(scores - scores.max())
    shares = (odds / odds.sum()).tolist()
    return tuple(
        Candidate(context[span.first : span.last], span.start_logit, span.end_logit, share)
        for span, share in zip(spans, shares, strict=True)
    )
