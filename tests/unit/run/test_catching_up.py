"""A run that goes on from a step whose evaluation was left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coremill.config.schema import EvaluationSection
from coremill.run import story
from coremill.tasks.base import LOSS
from coremill.train.scores import Scores


@pytest.mark.parametrize(
    ("is_known", "is_one_place", "done"),
    [
        (False, True, ["evaluated", "saved 20", "judged"]),  # a checkpoint that knows how good it is
        (True, True, ["evaluated", "judged"]),
        (False, False, ["evaluated", "judged"]),
    ],
)
def test_the_step_is_saved_again_with_its_evaluation(
    monkeypatch: pytest.MonkeyPatch, is_known: bool, is_one_place: bool, done: list[str]
) -> None:
    scores, did = Scores(LOSS, EvaluationSection(every_steps=10), steps=20), []
    if is_known:
        scores.add(20, {"loss": 1.0})

    def evaluate(run: Any, task: Any, training: Any, step: int) -> Any:
        scores.add(step, {"loss": 1.0})
        did.append("evaluated")
        return lambda: did.append("judged")

    monkeypatch.setattr(story, "evaluate", evaluate)
    origin: Any = SimpleNamespace(step=20, places=SimpleNamespace(is_one=is_one_place))
    saver: Any = SimpleNamespace(after_step=lambda step: did.append(f"saved {step}"))
    nothing: Any = None
    training: Any = SimpleNamespace(scores=scores)
    story.catch_up(nothing, nothing, training, origin, saver)
    assert did == done
