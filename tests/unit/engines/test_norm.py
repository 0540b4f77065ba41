"""The sum of squares that clipping depends on: exact to double, however gradients are cut."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from coremill.engines.base import SQUARES_AT_ONCE, sum_of_squares  # noqa: E402


def _exact(tensors: list[torch.Tensor]) -> float:
    return math.fsum(value * value for tensor in tensors for value in tensor.double().flatten().tolist())


def test_equals_the_exact_sum_over_several_blocks() -> None:
    tensors = [torch.randn(3, SQUARES_AT_ONCE // 2 + 7), torch.randn(5), torch.empty(0, 4), torch.full((9,), 1e25)]
    assert sum_of_squares(tensors[:3]) == pytest.approx(_exact(tensors[:3]), rel=1e-12)
    assert sum_of_squares(tensors) == pytest.approx(_exact(tensors), rel=1e-12)  # beyond what fp32 squares hold


def test_does_not_depend_on_the_cut() -> None:
    whole = torch.randn(4 * SQUARES_AT_ONCE + 11)
    assert sum_of_squares([whole]) == pytest.approx(sum_of_squares(whole.split(1000)), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_shows(bad: float) -> None:
    tensor = torch.zeros(SQUARES_AT_ONCE + 3)
    tensor[-1] = bad
    assert not math.isfinite(sum_of_squares([tensor]))
