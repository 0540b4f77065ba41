"""Exact match and F1 of answers, by the published rules of SQuAD 1.1 and 2.0.

Answers are compared without capitals, punctuation, articles and surplus blanks, with the right answer that fits best.
F1 is over their words, as often as each occurs; where comparing leaves no word on one side it is 1 or 0, as in version
2.0 and in torchmetrics (the script of 1.1 gives 0 even to a right "A"). Version 2.0 adds questions without an answer:
the right one is to give none. Both are means over all questions, in percent.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True)
class SquadScores:
    """In percent; of a side without questions None."""

    exact_match: float
    f1: float
    questions: int
    answerable_exact_match: float | None = None
    answerable_f1: float | None = None
    unanswerable_correct: float | None = None


def squad_scores(given: Sequence[str], answers: Sequence[Sequence[str]], *, version_2: bool) -> SquadScores:
    """Of answers `given`, beside the right ones of the same questions; `version_2`: some questions have none."""
    if not given:
        raise ValueError("no questions to score")
    pairs = [_score(text, right, version_2=version_2) for text, right in zip(given, answers, strict=True)]
    sides = [bool(_right_answers(right, version_2=version_2)[0]) for right in answers] if version_2 else []
    answerable = [pair for pair, has_answer in zip(pairs, sides, strict=False) if has_answer]
    others = [pair for pair, has_answer in zip(pairs, sides, strict=False) if not has_answer]
    return SquadScores(
        exact_match=_percent([exact for exact, _ in pairs]),
        f1=_percent([f1 for _, f1 in pairs]),
        questions=len(pairs),
        answerable_exact_match=_percent([exact for exact, _ in answerable]) if answerable else None,
        answerable_f1=_percent([f1 for _, f1 in answerable]) if answerable else None,
        unanswerable_correct=_percent([exact for exact, _ in others]) if others else None,
    )


def normalised(text: str) -> str:
    """As answers are compared."""
    plain = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(given: str, right: str) -> float:
    return float(normalised(given) == normalised(right))


def f1(given: str, right: str) -> float:
    """Harmonic mean of precision and recall of the words."""
    ours, theirs = normalised(given).split(), normalised(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(ours), shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


def _score(given: str, answers: Sequence[str], *, version_2: bool) -> tuple[float, float]:
    right = _right_answers(answers, version_2=version_2)
    return max(exact_match(given, each) for each in right), max(f1(given, each) for each in right)


def _right_answers(answers: Sequence[str], *, version_2: bool) -> Sequence[str]:
    """In version 2.0 an answer of which comparing leaves nothing is none; none at all is the empty one."""
    found = [answer for answer in answers if normalised(answer)] if version_2 else list(answers)
    return found or [""]


def _percent(values: Sequence[float]) -> float:
    """The mean; summed exactly, so that it depends on no order."""
    return 100.0 * math.fsum(values) / len(values)
