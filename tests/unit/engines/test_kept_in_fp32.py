"""Weights kept in fp32 beside a sharding engine: a rank that waits for the others' gradients says that it waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coremill.config.schema import TrainSection  # noqa: E402
from coremill.engines.base import StepTotals  # noqa: E402
from coremill.engines.kept_in_fp32 import KeepsInFp32  # noqa: E402
from coremill.engines.optimizers import optimizer_of  # noqa: E402
from coremill.errors import PeerLost  # noqa: E402
from coremill.world.heartbeat import HEARTBEAT  # noqa: E402


def test_a_rank_waits_for_the_others_gradients_and_names_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inner: Any = SimpleNamespace(name="shard", exchange=None, reduce=lambda *_: StepTotals(1.0, 3.0))
    world: Any = SimpleNamespace(size=2, group=None)
    engine = KeepsInFp32(inner, world, optimizer_of(TrainSection(steps=1)), torch.bfloat16)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    engine._weights, engine._used = {"router": weight}, {weight}
    depths = []

    def all_reduce(flat: Any, group: Any) -> None:
        depths.append(HEARTBEAT._depth)
        flat *= 2  # both ranks have the same
        if len(depths) > 1:
            raise RuntimeError("[gloo] Connection closed by peer")

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert engine.reduce(1.0).gradient_norm == 5.0 and depths == [1]
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))
    with pytest.raises(PeerLost):
        engine.reduce(1.0)
