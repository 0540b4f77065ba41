from __future__ import annotations

import json

import pytest

from coremill.data.examples import questions_of
from coremill.data.questions import Answer, Question
from coremill.errors import InputError

FORM = questions_of(question="question", context="context", answers="answers", id_column="id")
CONTEXT = "Zoë built a 🙂 mill in 1871.\nIt turns."
AT = CONTEXT.index("1871")


def read(**values) -> Question:
    row = {"id": "q1", "question": "When?", "context": CONTEXT, "answers": {"text": ["1871"], "answer_start": [AT]}}
    question = FORM.read({**row, **values}, "set.jsonl:3", 3)
    assert isinstance(question, Question)
    return question


@pytest.mark.parametrize(
    "answers",
    [
        {"text": ["1871"], "answer_start": [AT]},
        [{"text": "1871", "answer_start": AT}],
        {"text": "1871", "answer_start": AT},
        {"text": ["1871"], "answer_start": [float(AT)]},
        json.dumps({"text": ["1871"], "answer_start": [AT]}),  # a csv
    ],
)
def test_the_forms_of_answers(answers):
    assert read(answers=answers).answers == (Answer("1871", AT),)


@pytest.mark.parametrize("answers", [[], {}, {"text": [], "answer_start": []}, "[]"])
def test_questions_without_an_answer(answers):
    assert read(answers=answers).answers == ()
    assert read(answers=None, is_impossible=True).answers == ()


def test_several_answers_and_ids():
    two = read(answers=[{"text": "1871", "answer_start": AT}, {"text": "in 1871", "answer_start": AT - 3}])
    assert [answer.text for answer in two.answers] == ["1871", "in 1871"]
    assert (read(id=17).id, read(id=None).id) == ("17", "3")
    assert [read(id=empty).id for empty in (float("nan"), "", "  ")] == ["3"] * 3


@pytest.mark.parametrize(
    ("value", "said"),
    [("q\ud800", "column 'id' holds half a character"), ("q\0", "holds a NUL"), (["q"], "column 'id' holds no id")],
)
def test_ids_that_are_none(value, said):
    with pytest.raises(InputError, match=said) as error:
        read(id=value)
    assert error.value.where == "set.jsonl:3" and "remove the row" in error.value.do


def at(text: str, start: int) -> list[dict[str, object]]:
    return [{"text": text, "answer_start": start}]


@pytest.mark.parametrize(
    ("answers", "said", "cure"),
    [
        (at("1871", len(CONTEXT[:AT].encode())), "it counts bytes of UTF-8", ".encode()[:answer_start]"),
        (at("1871", AT + 1), "it counts UTF-16 units, as JavaScript and Java do", "utf-16-le"),
        (at("mill", CONTEXT.index("mill") - 1), "it is one too small", "add 1"),
        (at("Zoë built", 1), "it is one too large", "count from 0"),
        (at("It turns", CONTEXT.index("It") + 1 + 9), "stands at character 28, and answer_start is 38", "find"),
        (at("1871", -1), "it is negative", "[] where there is no answer"),
        (at("1872", AT), "no stretch of the context reads like it", "mend the answer"),
        (at("zoë", 0), "in other capitals", "mend"),
        (at("1871. It", AT), "other blanks or line breaks", "mend"),
        (at("Zoe\u0308", 0), "another Unicode form", "mend"),
        (at("", 0), "answer 1 is empty", "write []"),
        (at(3, 0), "answer 1 has no text", "mend"),
        ([{"text": "1871"}], "does not say where it begins", "context.find(text)"),
        ({"text": ["1871"]}, "does not say where it begins", "context.find(text)"),
        ({"text": ["a", "b"], "answer_start": [1]}, "2 answer texts and 1 values", "mend"),
        (None, "there is nothing in column 'answers'", "mend"),
        ("{'text': []}", "text that is not JSON", "json.dumps"),
        ("", "there is nothing in column 'answers'", "mend"),
        (["1871"], "holds no answers", "mend"),
    ],
)
def test_a_bad_answer_is_explained(answers, said, cure):
    with pytest.raises(InputError) as error:
        read(answers=answers)
    assert said in str(error.value) and cure in (error.value.do or "")
    assert error.value.where == "set.jsonl:3"


def test_line_ends_counted_twice():
    with pytest.raises(InputError, match="answer_start is not") as error:
        read(context="one\ntwo\nthree", answers=at("three", 10))
    assert "line ends as two characters" in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"question": "  "}, "the question is empty"),
        ({"context": ""}, "the context is empty"),
        ({"question": None}, "column 'question' holds no text"),
        ({"context": "half \ud800"}, "half a character"),
    ],
)
def test_bad_texts(values, said):
    with pytest.raises(InputError) as error:
        read(**values)
    assert said in str(error.value)
