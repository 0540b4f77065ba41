"""Weights become 16 bits for the wire, and fp32 again, within the place they have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from coremill.engines.wire.collectives import LEAST_MOVED_NUMEL, narrow_in_place, widen_in_place  # noqa: E402

SIZES = [0, 1, 2, 7, 2 * LEAST_MOVED_NUMEL - 1, 2 * LEAST_MOVED_NUMEL, 50_003]


def _values(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("numel", SIZES)
def test_widening_writes_over_nothing_that_is_not_read(numel: int) -> None:
    values = _values(numel).bfloat16()
    whole = torch.full((numel,), float("nan"))
    narrow = whole.view(torch.bfloat16)[numel:]
    narrow.copy_(values)
    widen_in_place(whole, narrow)
    assert torch.equal(whole, values.float())


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (0, 1)])
def test_narrowing_writes_over_nothing_that_is_not_read(numel: int, rank: int, ranks: int) -> None:
    """As a gather lays them: this rank's values at its place, its 16 bits in the upper half of the whole."""
    whole = torch.full((ranks * numel,), float("nan"))
    mine = whole.view(ranks, -1)[rank].copy_(_values(numel))
    piece = whole.view(torch.bfloat16)[ranks * numel :].view(ranks, -1)[rank]
    narrow_in_place(mine, piece)
    assert torch.equal(piece, _values(numel).bfloat16())
