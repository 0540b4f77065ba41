"""SQuAD's scores against torchmetrics (1.1) and against a reference written from the published rules (2.0)."""

from __future__ import annotations

import collections
import random
import re
import string

import numpy as np
import pytest
from made_questions import MadeQuestion, made_questions

from coremill.tasks.question_answering.squad_metrics import f1, normalised, squad_scores


@pytest.fixture(scope="module")
def questions() -> list[MadeQuestion]:
    return made_questions(2400)


def given_answers(questions: list[MadeQuestion]) -> list[str]:
    """Right, nearly right, wrong and none."""
    draw = random.Random(5)
    given = []
    for question in questions:
        words = question.asked.context.split()
        first = draw.randrange(len(words))
        right = draw.choice(question.asked.answers or ("",))
        nearly = " ".join(right.split()[1:] + ["the"]).upper()
        given.append(draw.choice([right, nearly, " ".join(words[first : first + 4]), ""]))
    return given


def test_version_1_is_that_of_torchmetrics(questions):
    """It sums in fp32: a few questions at a time agree to its last digits, all of them as near as that allows."""
    from torchmetrics.functional.text import squad

    answered = [question for question in questions if question.asked.answers]
    assert len(answered) > 1500
    given = given_answers(answered)
    answers = [question.asked.answers for question in answered]
    asked = [{"prediction_text": text, "id": str(at)} for at, text in enumerate(given)]
    right = [
        {"id": str(at), "answers": {"text": list(texts), "answer_start": [0] * len(texts)}}
        for at, texts in enumerate(answers)
    ]
    for at in range(0, len(given), 10):
        some = slice(at, at + 10)
        theirs = squad(asked[some], right[some])
        ours = squad_scores(given[some], answers[some], version_2=False)
        assert np.float32(ours.exact_match) == theirs["exact_match"].numpy()
        assert ours.f1 == pytest.approx(theirs["f1"].item(), rel=3e-7)
    theirs = squad(asked, right)
    ours = squad_scores(given, answers, version_2=False)
    assert np.float32(ours.exact_match) == theirs["exact_match"].numpy()
    assert ours.f1 == pytest.approx(theirs["f1"].item(), rel=1e-5)
    assert 10 < ours.exact_match < ours.f1 < 90


def reference_2(given: list[str], answers: list[tuple[str, ...]]) -> dict[str, float]:
    """Version 2.0 as its evaluation script describes it."""

    def normal(text: str) -> str:
        text = "".join(sign for sign in text.lower() if sign not in set(string.punctuation))
        return " ".join(re.compile(r"\b(a|an|the)\b", re.UNICODE).sub(" ", text).split())

    def words(text: str) -> list[str]:
        return normal(text).split() if text else []

    def score(ours: str, theirs: str) -> float:
        got, gold = words(ours), words(theirs)
        if len(got) == 0 or len(gold) == 0:
            return int(got == gold)
        same = sum((collections.Counter(gold) & collections.Counter(got)).values())
        if same == 0:
            return 0
        precision, recall = 1.0 * same / len(got), 1.0 * same / len(gold)
        return (2 * precision * recall) / (precision + recall)

    exact, scores = [], []
    for text, gold in zip(given, answers, strict=True):
        kept = [answer for answer in gold if normal(answer)] or [""]
        exact.append(max(int(normal(text) == normal(each)) for each in kept))
        scores.append(max(score(text, each) for each in kept))
    has = [bool(gold) and any(normal(answer) for answer in gold) for gold in answers]
    found = {"exact": 100.0 * sum(exact) / len(exact), "f1": 100.0 * sum(scores) / len(scores)}
    for name, wanted in (("has", True), ("none", False)):
        chosen = [(a, b) for a, b, side in zip(exact, scores, has, strict=True) if side is wanted]
        found[f"{name} exact"] = 100.0 * sum(a for a, _ in chosen) / len(chosen)
        found[f"{name} f1"] = 100.0 * sum(b for _, b in chosen) / len(chosen)
    return found


def test_version_2_is_that_of_the_published_rules(questions):
    given, answers = given_answers(questions), [question.asked.answers for question in questions]
    ours, theirs = squad_scores(given, answers, version_2=True), reference_2(given, answers)
    assert ours.exact_match == theirs["exact"] and ours.f1 == pytest.approx(theirs["f1"], rel=1e-14)
    assert ours.answerable_exact_match == theirs["has exact"]
    assert ours.answerable_f1 == pytest.approx(theirs["has f1"], rel=1e-14)
    assert ours.unanswerable_correct == theirs["none exact"]
    assert ours.questions == len(questions)
    shuffled = random.Random(1).sample(range(len(given)), len(given))
    again = squad_scores([given[at] for at in shuffled], [answers[at] for at in shuffled], version_2=True)
    assert again == ours  # to the bit, in any order


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Mill, a mill!", "mill mill"),
        ("an-other U.S. state", "another us state"),
        ("«the» café", "« » café"),  # only ASCII punctuation, as published
        ("theory of a", "theory of"),
        ("İx", "i̇x"),
        ("", ""),
    ],
)
def test_what_is_compared(text, plain):
    assert normalised(text) == plain


def test_words_count_as_often_as_they_occur():
    assert f1("mill mill", "mill") == pytest.approx(2 / 3)
    assert (f1("", ""), f1("the", "a"), f1("", "mill")) == (1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="no questions"):
        squad_scores([], [], version_2=True)
