"""Answers from windows against a reference written from the rules of transformers' run_qa example."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from made_questions import MadeQuestion, made_questions

from coremill.tasks.question_answering.post_processing import AnswerRules, ScoredWindow, answer, documents, predict

THRESHOLDS = (-4.0, 0.0, 2.5)


@pytest.fixture(scope="module")
def questions() -> list[MadeQuestion]:
    return made_questions(2200, seed=3)


def reference(question: MadeQuestion, rules: AnswerRules) -> tuple[str, list[dict[str, Any]], float | None]:
    """In plain loops: all pairs of the n best starts and ends of each window, the best n of all of these."""
    found: list[dict[str, Any]] = []
    null = None
    for window in question.windows:
        start_logits, end_logits, offsets = window.start_logits, window.end_logits, window.offsets.tolist()
        score = start_logits[0] + end_logits[0]
        if null is None or null["score"] > score:
            null = {"offsets": (0, 0), "score": score, "start": start_logits[0], "end": end_logits[0]}
        starts = np.argsort(start_logits)[-1 : -rules.n_best - 1 : -1].tolist()
        ends = np.argsort(end_logits)[-1 : -rules.n_best - 1 : -1].tolist()
        for start in starts:
            for end in ends:
                if offsets[start][0] < 0 or offsets[end][0] < 0:
                    continue
                if end < start or end - start + 1 > rules.max_answer_tokens:
                    continue
                found.append(
                    {
                        "offsets": (offsets[start][0], offsets[end][1]),
                        "score": start_logits[start] + end_logits[end],
                        "start": start_logits[start],
                        "end": end_logits[end],
                    }
                )
    assert null is not None
    if rules.version_2:
        found.append(null)
    best = sorted(found, key=lambda each: each["score"], reverse=True)[: rules.n_best]
    if rules.version_2 and not any(each["offsets"] == (0, 0) for each in best):
        best.append(null)
    for each in best:
        each["text"] = question.asked.context[each["offsets"][0] : each["offsets"][1]]
    texts = [each["text"] for each in best if each["text"]]
    if not rules.version_2:
        return (texts[0] if texts else ""), best, None
    first = next((each for each in best if each["text"]), None)
    if first is None:
        return "", best, float(null["score"])
    odds = float(null["score"]) - float(first["start"]) - float(first["end"])
    return ("" if odds > rules.null_threshold else first["text"]), best, odds


@pytest.mark.parametrize("version_2", [False, True])
def test_answers_are_those_of_the_rules(questions, version_2):
    draw = random.Random(2)
    without = 0
    for number, question in enumerate(questions):
        threshold = THRESHOLDS[number % 3]
        rules = AnswerRules(n_best=5 if number % 4 else 20, null_threshold=threshold, version_2=version_2)
        windows = draw.sample(question.windows, len(question.windows))  # in any order
        ours = answer(question.asked, windows, rules)
        text, best, odds = reference(question, rules)
        assert ours.text == text
        assert [each.text for each in ours.candidates] == [each["text"] for each in best]
        assert [each.start_logit for each in ours.candidates] == [float(each["start"]) for each in best]
        scores = np.array([each["score"] for each in best], dtype=np.float64)
        shares = np.exp(scores - scores.max(initial=0)) / np.exp(scores - scores.max(initial=0)).sum()
        assert [each.probability for each in ours.candidates] == pytest.approx(shares.tolist(), rel=1e-6)
        assert ours.null_odds == (None if odds is None else pytest.approx(odds, abs=1e-5))
        without += not text
    assert without > 100 or not version_2
    assert sum(len(question.windows) > 1 for question in questions) > 300


def test_no_answer_and_ties():
    """Equal scores are settled by place, so that the order of windows decides nothing."""
    question = made_questions(1)[0].asked
    offsets = np.array([[-1, -1], [0, 2], [3, 5], [-1, -1]], dtype=np.int32)
    flat = np.zeros(4, dtype=np.float32)
    window = ScoredWindow(offsets, flat, flat)
    assert answer(question, [window], AnswerRules()).text == question.context[0:2]
    only_question = ScoredWindow(np.full((4, 2), -1, dtype=np.int32), flat, flat)
    assert answer(question, [only_question], AnswerRules()).candidates == ()
    none = answer(question, [only_question], AnswerRules(version_2=True))
    assert (none.text, none.null_odds) == ("", 0.0)


class SplitOf:
    """What `predict` asks of an EncodedSplit, of questions in memory; some leave out windows of a question."""

    null_position = 0

    def __init__(self, questions: list[MadeQuestion]) -> None:
        self._questions = questions
        self.windows = [window for question in questions for window in question.windows]
        self.lengths = np.array([len(window.offsets) for window in self.windows], dtype=np.int32)
        self.row_examples = np.repeat(np.arange(len(questions)), [len(question.windows) for question in questions])

    def offsets(self, row: int) -> np.ndarray:
        return self.windows[row].offsets

    def questions(self):
        return (question.asked for question in self._questions)


def test_any_order_of_windows_and_ranks(questions):
    chosen, rules = questions[:300], AnswerRules(version_2=True)
    split = SplitOf(chosen)
    width = int(split.lengths.max()) + 3
    logits = np.full((2, len(split.windows), width), 99.0, dtype=np.float32)  # padding would win if it were looked at
    for row, window in enumerate(split.windows):
        logits[0, row, : len(window.offsets)] = window.start_logits
        logits[1, row, : len(window.offsets)] = window.end_logits
    ordered = predict(split, np.arange(len(split.windows)), logits[0], logits[1], rules)
    assert [each.id for each in ordered] == [question.asked.id for question in chosen]
    for seed in range(3):
        rows = np.random.default_rng(seed).permutation(len(split.windows))
        assert predict(split, rows, logits[0, rows], logits[1, rows], rules) == ordered
    some = np.flatnonzero(split.row_examples < 7)
    assert predict(split, some, logits[0, some], logits[1, some], rules) == ordered[:7]
    files = json.loads(json.dumps(documents(ordered)))
    assert set(files) == {"predictions.json", "nbest_predictions.json", "null_odds.json"}
    assert files["predictions.json"] == {each.id: each.text for each in ordered}
    assert set(files["nbest_predictions.json"]["q00000"][0]) == {"text", "probability", "start_logit", "end_logit"}
