"""Parts of a training step, each by itself: what processes do over and over that measure how these scale with threads
(hardware/splits.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Work = Callable[[], None]

HEAD_WIDTH = 64
ROW_TOKENS = 512
# A gated feed-forward is some 2.75 times as wide as the model.
WIDER = 11 / 4


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    import torch

    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def products(width: int, tokens: int, dtype: torch.dtype) -> Work:
    """Two linear maps, out of the width and back, and their backward."""
    import torch
    from torch.nn.functional import linear

    wide = int(WIDER * width)
    x, out, back = leaves = _leaves((tokens, width), (wide, width), (width, wide), dtype=dtype)
    gradient = torch.ones_like(x)

    def work() -> None:
        linear(linear(x, out), back).backward(gradient)
        _forget(leaves)

    return work


def between(width: int, tokens: int, dtype: torch.dtype) -> Work:
    """What stands between the products of a layer: norm, rotary positions, gate, residual; and their backward."""
    import torch
    from torch.nn.functional import rms_norm, silu

    wide = int(WIDER * width)
    shapes = (tokens, width), (width,), (tokens, wide), (tokens, wide)
    x, scale, gate, up = leaves = _leaves(*shapes, dtype=dtype)
    cosine, sine = torch.ones_like(x), torch.zeros_like(x)
    gradients = torch.ones_like(x), torch.ones_like(up)

    def work() -> None:
        normed = rms_norm(x, (width,), scale)
        first, second = normed.chunk(2, dim=-1)
        turned = normed * cosine + torch.cat((-second, first), dim=-1) * sine
        torch.autograd.backward((x + turned, silu(gate) * up), gradients)
        _forget(leaves)

    return work


def attention(width: int, tokens: int, dtype: torch.dtype) -> Work:
    """Causal attention over rows, and its backward."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    length = min(tokens, ROW_TOKENS)
    shape = (tokens // length, max(1, width // HEAD_WIDTH), length, HEAD_WIDTH)
    query, key, value = leaves = _leaves(shape, shape, shape, dtype=dtype)
    gradient = torch.ones_like(query)

    def work() -> None:
        scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)
        _forget(leaves)

    return work


def update(width: int, numbers: int, dtype: torch.dtype) -> Work:
    """AdamW's, of so many numbers in fp32."""
    import torch

    weight, gradient, first, second = (torch.full((numbers,), 1e-3) for _ in range(4))
    steps = torch.tensor(1.0)

    def work() -> None:
        torch._fused_adamw_(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [steps],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return work


def _forget(leaves: list[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


MAKERS = {"products": products, "between": between, "attention": attention, "update": update}
