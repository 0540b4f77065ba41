"""A lookup table of which ranks fetch rows: the same numbers as one process, and never whole on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ranks
from tiers import some_long
from tiny_models import make_config_folder
from training import make_packed, train_here

LENGTH, VOCABULARY = 16, 301  # not to be divided by any number of ranks here
SHAPE = {"hidden_size": 48, "intermediate_size": 96, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "kept through two passes": {"micro_batch_rows": 1, "keep_gathered": True},
    "three passes": {"micro_batch_rows": 1, "rows_per_step": 9},
    "recomputed": {"checkpointing": True},
}


def trained_cases(world: Any, common: dict[str, Any]) -> dict[str, Any]:
    """Every case on these ranks."""
    return {name: train_here(world, **{**common, **case}) for name, case in CASES.items()}


@pytest.mark.parametrize("family", some_long(["llama", "gpt_neox", "padded"], ["padded"], "one of three tables"))
def test_losses_are_those_of_one_process(family: str, tmp_path: Path) -> None:
    data = make_packed(tmp_path / "data", rows=24, length=LENGTH, vocabulary=VOCABULARY - 1).to_json()
    padding = {"pad_token_id": 7} if family == "padded" else {}  # a token of the text: its row gets no gradient
    make_config_folder(tmp_path / "model", "llama" if padding else family, **SHAPE, **padding)
    common = {"model_folder": str(tmp_path / "model"), "data": data, "weights": "random", "steps": 4}
    common |= {"rows_per_step": 6, "micro_batch_rows": 2}
    expected = ranks.run_ranks(trained_cases, 1, common={**common, "micro_batch_rows": 9})[0]
    for world_size in (2, 3):
        shared = {**common, "engine": "shard", "through_memory": False}
        for of_rank in ranks.run_ranks(trained_cases, world_size, common=shared):
            for name, found in of_rank.items():
                assert found["losses"] == pytest.approx(expected[name]["losses"], rel=1e-5), name
                assert found["norms"] == pytest.approx(expected[name]["norms"], rel=1e-4), name


def look_up(world: Any) -> dict[str, Any]:
    """Rows of a table whose row r holds r, by ranks that name different tokens; then what comes back."""
    import torch
    from torch import nn

    from coremill.engines.shard.embedding import ShardedEmbedding
    from coremill.engines.wire.codec import Plain
    from coremill.engines.wire.collectives import BufferPool, ReduceScatter
    from coremill.engines.wire.exchange import Exchange, WireMeter

    meter = WireMeter()
    exchange, codec = Exchange(meter, world.flows), Plain(torch.float32)
    reduce_scatter = ReduceScatter(exchange, BufferPool(), codec)
    embedding = nn.Embedding(10, 2, device="meta")
    table = ShardedEmbedding(
        embedding, world.mesh(), exchange, reduce_scatter, codec, wire_dtype=torch.float32, compute_dtype=torch.float32
    )
    begin = 4 * world.rank  # ten rows on three ranks: 4, 4, 2
    held = torch.arange(begin, min(10, begin + 4)).float().unsqueeze(1).expand(-1, 2).contiguous()
    table.rows = nn.Parameter(held)
    tokens = [torch.tensor([[9, 0], [9, 3]]), torch.tensor([[3, 3, 3]]), torch.tensor([[8]])][world.rank]
    rows = embedding(tokens)
    (rows * (world.rank + 1)).sum().backward()
    reduce_scatter.flush()
    gradient = table.take_gradient()
    assert gradient is not None
    found = {
        "looked_up": torch.equal(rows, tokens.float().unsqueeze(-1).expand(-1, -1, 2)),
        "held": list(table.rows.shape),
        "gradient": gradient[:, 0].tolist(),
        "again": table.take_gradient(),
        "sent": sum(use.bytes for use in meter.take().values()),
    }
    try:
        embedding(torch.tensor([4, 10]))
    except IndexError as error:
        found["error"] = str(error)
    return found


def test_each_row_comes_from_its_rank_and_its_gradient_goes_back_there() -> None:
    found = ranks.run_ranks(look_up, 3)
    assert all(rank["looked_up"] and rank["again"] is None for rank in found)
    assert [rank["held"] for rank in found] == [[4, 2], [4, 2], [2, 2]]
    # Rank 0 names 0 and 3 once and 9 twice, rank 1 names 3 three times, rank 2 names 8; each weighs its rank plus one.
    assert [rank["gradient"] for rank in found] == [[1.0, 0.0, 0.0, 1.0 + 6.0], [0.0] * 4, [3.0, 2.0]]
    # A byte for each row of the others, rows in fp32 to who asked, gradients to who holds them.
    assert [rank["sent"] for rank in found] == [6 + 8 + 8, 6 + 0 + 8, 8 + 8 + 0]
    assert all("10" in rank["error"] for rank in found)


def look_up_often(world: Any) -> dict[str, Any]:
    """Passes of a step whose weights stay gathered: nothing but the lookup sends gradients until the last."""
    import torch
    from torch import nn

    from coremill.engines.shard.embedding import ShardedEmbedding
    from coremill.engines.wire import collectives
    from coremill.engines.wire.codec import Plain
    from coremill.engines.wire.exchange import Exchange, WireMeter

    collectives.ROOM_IN_FLIGHT_BYTES = 0  # this process is only for this
    exchange, codec = Exchange(WireMeter(), world.flows), Plain(torch.float32)
    reduce_scatter = collectives.ReduceScatter(exchange, collectives.BufferPool(), codec)
    embedding = nn.Embedding(10, 2, device="meta")
    table = ShardedEmbedding(
        embedding, world.mesh(), exchange, reduce_scatter, codec, wire_dtype=torch.float32, compute_dtype=torch.float32
    )
    table.rows = nn.Parameter(torch.zeros(5, 2))
    waiting = []
    for each in range(PASSES):
        (embedding(torch.tensor([each % 5, 7])) * (world.rank + 1)).sum().backward()
        waiting.append(len(reduce_scatter._in_flight))
    reduce_scatter.flush()
    gradient = table.take_gradient()
    assert gradient is not None
    return {"waiting": max(waiting), "gradient": gradient[:, 0].tolist()}


PASSES = 10


def test_gradients_of_rows_do_not_pile_up_over_the_passes_of_a_step() -> None:
    first, second = ranks.run_ranks(look_up_often, 2)
    assert first["gradient"] == [6.0] * 5 and second["gradient"] == [0.0, 0.0, 30.0, 0.0, 0.0]
    assert first["waiting"] <= 2 and second["waiting"] <= 2
