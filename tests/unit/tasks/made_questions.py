"""Questions with windows and logits, made up: unanswerable ones, several answers, long contexts, unicode."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from coremill.data.encoded_split import AskedQuestion
from coremill.tasks.question_answering.post_processing import ScoredWindow

TEXT = (
    "the a an The mill turns, and An answer (of many) comes; in 1871 it was built! café naïve straße 文字 字 🙂 ∑ Zoë's"
    " state-of-the-art don't U.S. 3.5 «Guillemets» İstanbul ﬁne x² №5 a.b --- ' \" -- Éire ẞ"
)
WORDS = TEXT.split()
WINDOW, STRIDE, QUESTION_TOKENS = 40, 12, 5


@dataclass(frozen=True)
class MadeQuestion:
    asked: AskedQuestion
    windows: tuple[ScoredWindow, ...]


def made_questions(count: int, seed: int = 11) -> list[MadeQuestion]:
    draw = random.Random(seed)
    numbers = np.random.default_rng(seed)
    return [_made(number, draw, numbers) for number in range(count)]


def _made(number: int, draw: random.Random, numbers: np.random.Generator) -> MadeQuestion:
    words = draw.choices(WORDS, k=draw.randint(1, 150 if number % 5 == 0 else 30))
    context = " ".join(words)
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    offsets = np.stack([ends - [len(word) for word in words], ends], axis=1)
    answers = []
    for _ in range(0 if number % 3 == 0 else draw.randint(1, 4)):
        first = draw.randrange(len(words))
        last = min(len(words), first + draw.randint(1, 5))
        answers.append(context[offsets[first, 0] : offsets[last - 1, 1]])
    asked = AskedQuestion(f"q{number:05}", "who?", context, tuple(answers))
    windows = tuple(_window(offsets[at : at + WINDOW], numbers) for at in range(0, len(words), WINDOW - STRIDE))
    return MadeQuestion(asked, windows)


def _window(context: np.ndarray, numbers: np.random.Generator) -> ScoredWindow:
    offsets = np.full((QUESTION_TOKENS + len(context) + 1, 2), -1, dtype=np.int32)
    offsets[QUESTION_TOKENS:-1] = context
    logits = numbers.normal(size=(2, len(offsets))).astype(np.float32) * 3
    return ScoredWindow(offsets, logits[0], logits[1])
