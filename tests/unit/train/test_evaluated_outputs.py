"""What an evaluation makes of outputs that are no numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from coremill.tasks.base import Metric, Scored  # noqa: E402
from coremill.train.evaluation import evaluate_rows  # noqa: E402


@pytest.mark.parametrize("loss", [0.5, math.nan, math.inf])
def test_outputs_are_scored_only_where_the_loss_is_a_number(loss: float) -> None:
    """The class of NaN logits is the first one, right as often as any."""
    world: Any = SimpleNamespace(rank=0, size=1, sum=float, gather=lambda value: [value], broadcast=lambda value: value)
    task: Any = SimpleNamespace(
        evaluate=lambda module, batch, scale: (torch.tensor(loss), [np.full(2, loss, np.float32)]),
        score=lambda rows, row_ids, outputs: Scored({"accuracy": 1.0}, {"predictions.json": "[]"}),
    )

    class Batches(list[Any]):
        valid_targets = 1

    engine: Any = SimpleNamespace(module=torch.nn.Module())
    batches: Any = Batches([SimpleNamespace(row_ids=(0,))])
    rows: Any = None
    found = evaluate_rows(engine, task, rows, batches, [Metric("accuracy", "higher")], world)
    if math.isfinite(loss):
        assert found.metrics == {"accuracy": 1.0} and found.files
    else:
        assert math.isnan(found.metrics["accuracy"]) and not found.files and found.bad_rows == [0]
