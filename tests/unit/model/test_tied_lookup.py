"""A tied table has one gradient: the head's, with the lookup's rows added in place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from coremill.model.chunked_loss import HeadLoss  # noqa: E402
from coremill.model.tied_lookup import tied_lookup  # noqa: E402

VOCABULARY, WIDTH = 37, 16


class _Model(nn.Module):
    def __init__(self, dtype: torch.dtype, padding_id: int | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding_id)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.middle(self.embedding(ids))))
        return result


def _ids() -> torch.Tensor:
    # Token 5 comes often, 36 never: what is summed and what stays zero.
    return torch.randint(0, 9, (3, 20), generator=torch.Generator().manual_seed(1)).clamp(min=1)


def _gradients(model: _Model, ids: torch.Tensor, passes: int) -> list[torch.Tensor]:
    """As the plain modules and autograd give them."""
    for _ in range(passes):
        flat = model(ids)[:, :-1].float().reshape(-1, VOCABULARY)
        (F.cross_entropy(flat, ids[:, 1:].reshape(-1), reduction="sum") * 0.01).backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def _handed_over_gradients(model: _Model, ids: torch.Tensor, passes: int) -> list[torch.Tensor]:
    lookup = tied_lookup(model.embedding, model.head)
    assert lookup is not None
    loss = HeadLoss(model.head, lookup)
    for _ in range(passes):
        loss.expect(ids, 0.01)
        model(ids).backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("padding_id", [None, 5])
@pytest.mark.parametrize("passes", [1, 2])
def test_same_gradients_as_autograd(padding_id: int | None, passes: int) -> None:
    expected = _gradients(_Model(torch.float32, padding_id), _ids(), passes)
    found = _handed_over_gradients(_Model(torch.float32, padding_id), _ids(), passes)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_bf16_rows_are_rounded_once() -> None:
    """Nearer to fp32 than autograd comes, which adds equal tokens in bf16 and the two tables after that."""
    exact = _gradients(_Model(torch.bfloat16, None).float(), _ids(), 1)[0]
    plain = _gradients(_Model(torch.bfloat16, None), _ids(), 1)[0]
    found = _handed_over_gradients(_Model(torch.bfloat16, None), _ids(), 1)[0]
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() <= (plain - exact).norm()


def test_only_one_tensor_of_the_tables_size_is_made() -> None:
    model = _Model(torch.float32, None)
    lookup = tied_lookup(model.embedding, model.head)
    loss = HeadLoss(model.head, lookup)
    loss.expect(_ids(), 1.0)
    value = model(_ids())
    handed = value.grad_fn.handover
    made = value.grad_fn.gradients[1].data_ptr()
    value.backward()
    assert model.head.weight.grad is not None
    assert model.head.weight.grad.data_ptr() == made
    assert handed.gradient is None


def test_no_backward_no_handover() -> None:
    model = _Model(torch.float32, None)
    lookup = tied_lookup(model.embedding, model.head)
    assert lookup is not None
    with torch.no_grad():
        model(_ids())
    assert lookup.take_handover() is None


def test_others_stay_as_they_are() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2.0

    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    assert tied_lookup(nn.Embedding(VOCABULARY, WIDTH), head) is None  # not tied
    scaled = Scaled(VOCABULARY, WIDTH)
    head.weight = scaled.weight
    assert tied_lookup(scaled, head) is None
    assert "forward" not in scaled.__dict__
