"""An engine's update: clipping by the norm it found, a step left out, and which optimizers there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")

from coremill.config.schema import TrainSection  # noqa: E402
from coremill.engines.optimizers import OPTIMIZERS, optimizer_of  # noqa: E402
from coremill.engines.optimizers.cost import COSTS  # noqa: E402
from coremill.engines.replicate.engine import ReplicateEngine  # noqa: E402
from coremill.engines.wire.codec import codec_of  # noqa: E402

WORLD: Any = SimpleNamespace(rank=0, size=1, flows=1, sums=list)


def started(*frozen: str) -> ReplicateEngine:
    optimizer = optimizer_of(TrainSection(steps=2, weight_decay=0.0))
    engine = ReplicateEngine(
        WORLD, optimizer, compute_dtype=torch.float32, gradient_codec=codec_of("fp32"), why_wire=""
    )
    model = torch.nn.Linear(2, 2, device="meta")
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    engine.place(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    engine.start()
    return engine


def reduced(engine: ReplicateEngine, scale: float = 1.0) -> None:
    engine.forward_backward(lambda module: scale * module(torch.ones(1, 2)).sum(), is_last=True)
    engine.reduce(1.0)


def test_gradients_are_clipped_to_the_norm_that_was_found() -> None:
    once, clipped = started(), started()
    for engine, scale, clip_norm in ((once, 1.0, None), (clipped, 1000.0, 6**0.5)):  # six gradients of 1
        reduced(engine, scale)
        engine.step(0.1, clip_norm)
    for one, other in zip(once.state(), clipped.state(), strict=True):
        assert one.updates == other.updates == 1
        torch.testing.assert_close(one.optimizer, other.optimizer)
        assert one.rows.local.grad is None


def test_a_step_that_is_left_out_changes_nothing() -> None:
    engine = started()
    reduced(engine, float("nan"))
    engine.skip_step()
    assert all(bool((each.rows.local == 1.0).all()) and each.updates == 0 for each in engine.state())
    assert all(weight.grad is None for _, weight in engine.trainable())


def test_what_is_frozen_has_no_state_and_takes_no_room_for_it() -> None:
    engine = started("bias")
    reduced(engine)
    engine.step(0.1, None)
    weight, bias = engine.state()
    assert [name for name, _ in engine.trainable()] == ["weight"]
    assert (set(weight.optimizer), weight.updates) == ({"exp_avg", "exp_avg_sq"}, 1)
    assert (bias.optimizer, bias.updates) == ({}, 0)
    assert engine.state_bytes() == 4 * (4 + 8) + 2 * 4


def test_the_run_file_names_the_optimizers_there_are() -> None:
    assert get_args(TrainSection.model_fields["optimizer"].annotation) == ("auto", *OPTIMIZERS)
    assert tuple(OPTIMIZERS) == tuple(COSTS)
