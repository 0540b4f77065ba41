"""Windows against the tokenizers library's own, and answers against run_qa's way of finding them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from coremill.data.pair_tokenizer import load_pair_tokenizer
from coremill.data.questions import Answer, Question
from coremill.data.windows import Windows
from coremill.errors import InputError
from pair_tokenizers import TEXT, make_bert_tokenizer, make_roberta_tokenizer

LENGTH, STRIDE = 48, 12


@pytest.fixture(params=[make_bert_tokenizer, make_roberta_tokenizer], ids=["bert", "roberta"])
def tokenizer(request, tmp_path):
    return load_pair_tokenizer(request.param(tmp_path))


def questions(count: int) -> list[Question]:
    draw = random.Random(3)
    words = " ".join(TEXT).split()
    found = []
    for number in range(count):
        context = " ".join(draw.choices(words, k=draw.randint(1, 90)))
        chosen = sorted(draw.sample(range(len(context) + 1), 2))
        text = context[slice(*chosen)]
        answers = (Answer(text, chosen[0]),) if text.strip() and number % 4 else ()
        found.append(Question(str(number), " ".join(draw.choices(words, k=draw.randint(1, 6))), context, answers))
    return found


def place_by_run_qa(offsets, sides, answer: Answer) -> tuple[int, int]:
    """The loops of the published example; blanks around the answer aside."""
    first = answer.start + len(answer.text) - len(answer.text.lstrip())
    last = first + len(answer.text.strip())
    start = sides.index(1)
    end = len(sides) - 1 - sides[::-1].index(1)
    if not (offsets[start][0] <= first and offsets[end][1] >= last):
        return 0, 0
    while start < len(offsets) and sides[start] == 1 and offsets[start][0] <= first:
        start += 1
    while sides[end] == 1 and offsets[end][1] >= last:
        end -= 1
    return start - 1, end + 1


def offsets_shared(offsets, *tokens: int) -> bool:
    """Whether one of the tokens is part of a character: there run_qa's answers may end before they begin."""
    neighbours = [(token, other) for token in tokens for other in (token - 1, token + 1) if other < len(offsets)]
    return any(offsets[token] == offsets[other] != (0, 0) for token, other in neighbours)


def test_windows_are_those_of_the_library(tokenizer):
    backend, asked = tokenizer.backend, questions(300)
    made = list(Windows(tokenizer, sequence_length=LENGTH, doc_stride=STRIDE).of(asked))
    several = compared = 0
    for question, windows in zip(asked, made, strict=True):
        backend.no_truncation()
        size = len(backend.encode(question.question, add_special_tokens=False))
        layout = tokenizer.pair_layout()
        if LENGTH - size - layout.special <= STRIDE:
            assert isinstance(windows, InputError)
            continue
        assert not isinstance(windows, InputError)
        backend.enable_truncation(LENGTH, stride=STRIDE, strategy="only_second")
        whole = backend.encode(question.question, question.context)
        several += bool(whole.overflowing)
        theirs = [whole, *whole.overflowing]
        assert [window.ids.tolist() for window in windows] == [each.ids for each in theirs]
        assert [window.types.tolist() for window in windows] == [each.type_ids for each in theirs]
        for window, each in zip(windows, theirs, strict=True):
            context = np.array(each.sequence_ids) == np.array(1)
            assert np.array_equal(window.offsets[context], np.array(each.offsets)[context])
            assert (window.offsets[~context] == -1).all()
            right = (0, 0)
            if question.answers:
                right = place_by_run_qa(each.offsets, each.sequence_ids, question.answers[0])
            shared = offsets_shared(each.offsets, window.start, window.end)
            compared += not shared
            assert (window.start, window.end) == right or shared
    backend.no_truncation()
    assert several > 50 and compared > 300


def test_the_answer_can_be_read_back(tokenizer):
    """Where an answer is words of the context, the tokens found stand for exactly these."""
    draw = random.Random(5)
    words = " ".join(TEXT).replace(";", "").split()
    asked = []
    for number in range(200):
        chosen = draw.choices(words, k=draw.randint(2, 60))
        first = draw.randrange(len(chosen))
        text = " ".join(chosen[first : first + 3])
        start = len(" ".join([*chosen[:first], ""]))
        asked.append(Question(str(number), "who asks", " ".join(chosen), (Answer(text, start),)))
    inside = 0
    for question, windows in zip(asked, Windows(tokenizer, sequence_length=64, doc_stride=16).of(asked), strict=True):
        assert not isinstance(windows, InputError)
        found = [window for window in windows if window.start]
        inside += bool(found)
        for window in found:
            stretch = slice(int(window.offsets[window.start, 0]), int(window.offsets[window.end, 1]))
            assert question.context[stretch] == question.answers[0].text
    assert inside > 150  # the others are longer than what windows share


def test_a_question_that_leaves_no_room(tokenizer):
    long = Question("1", " ".join(["numbers"] * 60), "the mill", ())
    (problem,) = Windows(tokenizer, sequence_length=LENGTH, doc_stride=STRIDE).of([long])
    assert isinstance(problem, InputError) and "the question is too long" in str(problem)
    with pytest.raises(InputError, match="data.doc_stride must be below"):
        Windows(tokenizer, sequence_length=32, doc_stride=30)


def test_a_context_of_no_tokens(tmp_path: Path):
    """Control characters are dropped by BERT's tokenizer: a window without a context, and nothing breaks."""
    tokenizer = load_pair_tokenizer(make_bert_tokenizer(tmp_path))
    (windows,) = Windows(tokenizer, sequence_length=32, doc_stride=8).of([Question("1", "who", "\u200b\x01", ())])
    assert not isinstance(windows, InputError) and len(windows) == 1
