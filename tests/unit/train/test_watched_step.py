from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from coremill.train.watched_step import WatchedStep, part_of, watched  # noqa: E402


def block(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.linear(x, x).reshape(1, 4, 256, 64)
    return torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).tanh()


def gradient(dtype: torch.dtype, *, recomputes: bool) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(256, 256).to(dtype).requires_grad_()
    out = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    out.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_watched_step_has_the_same_bits(dtype: torch.dtype, recomputes: bool) -> None:
    plain = gradient(dtype, recomputes=recomputes)
    with WatchedStep() as watch:
        seen = gradient(dtype, recomputes=recomputes)
    assert seen.equal(plain)
    assert watch.seconds["products"] > 0 and watch.seconds["attention"] > 0


def test_parts_go_by_the_names_of_operations() -> None:
    aten = torch.ops.aten
    assert part_of(aten.addmm.default) == part_of(aten.bmm.out) == "products"
    assert part_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default) == "attention"
    assert part_of(aten.mul.Tensor) is None


def test_nothing_is_watched_where_it_is_not_due() -> None:
    with watched(False) as watch:
        assert watch is None
