"""Replicate sends rows of a table that tokens named: the gradients of one process, whatever else reads the table."""

from __future__ import annotations

from typing import Any

import pytest

import ranks

torch = pytest.importorskip("torch")

ROWS, WIDTH = 5000, 64


def make_model(*, reads_whole: bool) -> Any:
    """A lookup and a product; the whole table may have another use, in passes where a token names its last row."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(ROWS, WIDTH)
            self.head = torch.nn.Linear(WIDTH, 3)

        def forward(self, token_ids: Any) -> Any:
            result = self.head(self.table(token_ids)).square().sum()
            if reads_whole and bool((token_ids == ROWS - 1).any()):
                result = result + self.table.weight.sin().sum()
            return result

    return Model()


def passes_of(rank: int, step: int) -> list[Any]:
    """Two passes of tokens, some of them twice; rank 1 alone names the last row, in the second step."""
    tokens = torch.arange(40).reshape(2, 20) * (7 + 3 * rank + step) % 300
    tokens[:, 3] = tokens[:, 4]
    if rank == 1 and step == 1:
        tokens[0, 0] = ROWS - 1
    return list(tokens)


def gradients_and_bytes(world: Any, *, reads_whole: bool, dtype: str) -> list[dict[str, Any]]:
    """Of two steps: each gradient, what one process would have, and the bytes that were sent."""
    from coremill.config.schema import TrainSection
    from coremill.engines.optimizers import optimizer_of
    from coremill.engines.replicate.engine import ReplicateEngine
    from coremill.engines.wire.codec import codec_of

    torch.manual_seed(5)
    reference = make_model(reads_whole=reads_whole)
    if dtype == "bf16":
        for weight in reference.parameters():
            weight.data = weight.data.bfloat16().float()
    with torch.device("meta"):
        model = make_model(reads_whole=reads_whole)
    engine = ReplicateEngine(
        world,
        optimizer_of(TrainSection(steps=2)),
        compute_dtype=getattr(torch, dtype),
        gradient_codec=codec_of("fp32"),
        why_wire="",
    )
    engine.place(model)
    with torch.no_grad():
        for weight, given in zip(model.parameters(), reference.parameters(), strict=True):
            weight.copy_(given)
    engine.start()
    found = []
    for step in range(2):
        passes = passes_of(world.rank, step)
        for place, tokens in enumerate(passes):
            engine.forward_backward(lambda module, tokens=tokens: module(tokens).float(), is_last=place == 1)
        totals = engine.reduce(1.0)
        reference.zero_grad()
        for rank in range(world.size):
            for tokens in passes_of(rank, step):
                reference(tokens).backward()
        gradients = [weight.grad for _, weight in engine.trainable()]
        expected = [weight.grad for weight in reference.parameters()]
        apart = [float((a - b).norm() / b.norm()) for a, b in zip(gradients, expected, strict=True)]
        norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
        table = gradients[0]
        found.append(
            {
                "apart": max(apart),
                "norm": [totals.gradient_norm, norm],
                "same as": float(table.double().sum()),
                "bytes": engine.wire_use().bytes_sent,
            }
        )
        engine.skip_step()
        assert engine.examine(lambda module, tokens=passes[0]: module(tokens).float())
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reads_whole", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_one_process(world_size: int, reads_whole: bool, dtype: str) -> None:
    by_rank = ranks.run_ranks(gradients_and_bytes, world_size, reads_whole=reads_whole, dtype=dtype)
    whole_bytes = 2 * (world_size - 1) * 4 * ROWS * WIDTH // world_size
    for step in range(2):
        found = [rank[step] for rank in by_rank]
        assert len({each["same as"] for each in found}) == 1
        for each in found:
            assert each["apart"] < (1e-6 if dtype == "float32" else 0.02)
            assert each["norm"][0] == pytest.approx(each["norm"][1], rel=1e-9)
            # Where one rank has another use for the table, all send it whole.
            assert (each["bytes"] > whole_bytes) == (reads_whole and step == 1)
