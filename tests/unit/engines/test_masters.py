"""bf16 weights and their fp32 masters on one rank: what had no use in a step, and what is not trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coremill.config.schema import TrainSection  # noqa: E402
from coremill.engines.optimizers import optimizer_of  # noqa: E402
from coremill.engines.replicate.engine import ReplicateEngine  # noqa: E402
from coremill.engines.wire.codec import codec_of  # noqa: E402


class Halves(torch.nn.Module):
    """Uses one of its parts in a pass; the third is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3))
        self.parts[2].requires_grad_(False)

    def forward(self, used: int) -> torch.Tensor:
        return (self.parts[used] * self.parts[2]).sum()


def test_a_gradient_of_the_step_before_is_not_used_again_and_frozen_weights_have_none() -> None:
    world: Any = SimpleNamespace(rank=0, size=1, flows=1, sums=list)
    engine = ReplicateEngine(
        world,
        optimizer_of(TrainSection(steps=1)),
        compute_dtype=torch.bfloat16,
        gradient_codec=codec_of("fp32"),
        why_wire="",
    )
    with torch.device("meta"):
        model = Halves()
    engine.place(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    engine.start()
    for used, expected in ((0, [4.0, None]), (1, [None, 4.0]), (0, [4.0, None])):
        engine.forward_backward(lambda module, used=used: module(used), is_last=True)
        totals = engine.reduce(1.0)
        sums = [None if master.grad is None else float(master.grad.sum()) for _, master in engine.trainable()]
        assert sums == expected and totals.gradient_norm == 2.0
        engine.skip_step()
    assert [(piece.name, piece.local.requires_grad) for piece in engine.slices()] == [
        ("parts.0", True),
        ("parts.1", True),
        ("parts.2", False),
    ]
