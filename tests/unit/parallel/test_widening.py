"""Weights that arrive in 16 bits become fp32 where they lie."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from coremill.parallel.collectives import LEAST_WIDENED_NUMEL, widen_in_place  # noqa: E402


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 2 * LEAST_WIDENED_NUMEL - 1, 2 * LEAST_WIDENED_NUMEL, 100_003])
def test_nothing_is_written_over_before_it_is_read(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = torch.full((numel,), float("nan"))
    narrow = whole.view(torch.bfloat16)[numel:]
    narrow.copy_(values)
    widen_in_place(whole, narrow)
    assert torch.equal(whole, values.float())
