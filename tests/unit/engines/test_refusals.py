"""What shard cannot do it says before anything is placed: share out a single number, leave out layers at random."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coremill.config.schema import TrainSection  # noqa: E402
from coremill.engines.one_host.engine import OneHostEngine  # noqa: E402
from coremill.engines.optimizers import optimizer_of  # noqa: E402
from coremill.engines.shard.engine import ShardEngine  # noqa: E402
from coremill.engines.wire.codec import codec_of  # noqa: E402
from coremill.errors import InputError  # noqa: E402

WORLD: Any = SimpleNamespace(rank=0, size=2, nodes=2, flows=1)


def over_the_wire() -> ShardEngine:
    return ShardEngine(
        WORLD,
        optimizer_of(TrainSection(steps=1)),
        compute_dtype=torch.float32,
        gradient_codec=codec_of("fp32"),
        weight_wire_dtype=None,
        keep_gathered=False,
        accumulates=False,
        head_in_backward=False,
        why_wire="two hosts",
    )


def through_memory() -> OneHostEngine:
    peers: Any = None  # it does not get that far
    return OneHostEngine("shard", WORLD, peers, optimizer_of(TrainSection(steps=1)), compute_dtype=torch.float32)


@pytest.mark.parametrize("make", [over_the_wire, through_memory])
def test_it_is_named_with_a_way_out(make: Any) -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    model.scale = torch.nn.Parameter(torch.ones((), device="meta"))
    with pytest.raises(InputError, match="scale is a single number") as refused:
        make().place(model)
    assert "parallel.engine=replicate" in str(refused.value.do)


def test_layers_left_out_at_random_are_refused_where_all_ranks_gather_each() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    model.config = SimpleNamespace(layerdrop=0.1)
    with pytest.raises(InputError, match="layerdrop 0.1 skips layers") as refused:
        over_the_wire().place(model)
    assert "parallel.engine=replicate" in str(refused.value.do)
