"""Gradients leave in the order in which backward makes them, also where layers share weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from coremill.config.schema import TrainSection
from coremill.engines.one_host.engine import in_backward_order
from coremill.engines.optimizers import optimizer_of
from coremill.engines.shard.engine import ShardEngine
from coremill.errors import InputError


class Decoder(nn.Module):
    """Three layers; the first and the last share one block, as Zamba's do."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        block = nn.Linear(4, 4)
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"own": nn.Linear(4, 4)}) for _ in range(3))
        self.layers[0]["block"], self.layers[2]["block"] = block, block if shares else nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("shares", [True, False])
def test_what_layers_share_leaves_after_all_layers(shares: bool) -> None:
    model = Decoder(shares=shares)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = in_backward_order(model)
    assert [group.is_layer for group in groups] == [False, True, True, True, False, False]
    head, last, _, first, rest, lookup = [[names[each] for each in group.parameters] for group in groups]
    assert (head, lookup) == (["head.weight", "head.bias"], ["embedding.weight"])
    shared = ["layers.0.block.weight", "layers.0.block.bias"]
    assert (shared[0] in first, shared[0] in rest) == (not shares, shares)
    assert len(last) == (2 if shares else 4)


def test_between_hosts_layers_that_share_weights_are_refused() -> None:
    world: Any = SimpleNamespace(flows=[], nodes=2, size=2, rank=0)
    codec: Any = SimpleNamespace(dtype=None)
    how: dict[str, Any] = {"weight_wire_dtype": None, "keep_gathered": False, "accumulates": False}
    how |= {"head_in_backward": False, "why_wire": "two hosts"}
    engine = ShardEngine(
        world, optimizer_of(TrainSection(steps=1)), compute_dtype=torch.float32, gradient_codec=codec, **how
    )
    with pytest.raises(InputError, match="layers of Decoder share weights(?s:.)*parallel.engine=replicate"):
        engine.place(Decoder(shares=True))
