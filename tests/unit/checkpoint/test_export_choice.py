"""Which weights a run exports in the end: those in memory are of the last step done, evaluated or not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.checkpoint import export_best
from coremill.checkpoint.export import ExportReport
from coremill.config.schema import EvaluationSection
from coremill.tasks.base import LOSS
from coremill.train.scores import Scores

NOTHING: Any = None


def exported(monkeypatch: pytest.MonkeyPatch, kept: list[int], done: int) -> tuple[str, int | None, str | None]:
    """After evaluations of steps 10 and 20, of which 20 is the best."""
    report = ExportReport(Path("export"), 0, 0.0, ())
    took: list[str] = []
    scores = Scores(LOSS, EvaluationSection(every_steps=10, keep_best=True), steps=100)
    for step, loss in ((10, 2.0), (20, 1.0)):
        scores.add(step, {"loss": loss})
    wholes = tuple(SimpleNamespace(name=f"step-{step:08d}") for step in kept)
    monkeypatch.setattr(export_best, "survey_together", lambda *given: SimpleNamespace(whole=wholes))

    def verified(store: Any, whole: Any, *rest: Any) -> tuple[Any, None]:
        return SimpleNamespace(step=int(whole.name.removeprefix("step-"))), None

    def took_it(name: str) -> Any:
        def export(*given: Any, **named: Any) -> ExportReport:
            took.append(name)
            return report

        return export

    monkeypatch.setattr(export_best, "verified", verified)
    monkeypatch.setattr(export_best, "export_model", took_it("memory"))
    monkeypatch.setattr(export_best, "_export", took_it("checkpoint"))
    training: Any = SimpleNamespace(scores=scores, model=None)
    origin: Any = SimpleNamespace(store=SimpleNamespace(folder=Path()), places=None)
    world: Any = SimpleNamespace(rank=0)
    made, reason = export_best.export_chosen(
        training, origin, done, NOTHING, None, Path(), world=world, dtype=NOTHING, events=NOTHING
    )
    return took[0], made.step, reason


def test_the_weights_in_memory_are_of_the_last_step_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exported(monkeypatch, [10, 20], 20) == ("memory", 20, "the best (loss 1)")
    assert exported(monkeypatch, [10, 20], 25) == ("checkpoint", 20, "the best (loss 1)")
    assert exported(monkeypatch, [10], 25) == ("checkpoint", 10, "the best that is kept (loss 2)")
    assert exported(monkeypatch, [], 25) == ("memory", 25, None)
