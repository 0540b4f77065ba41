"""The chunked loss is the plain one, value and gradients, whatever the chunks."""

import pytest
import torch
from torch.nn import functional as F

from coremill.data.packed_batches import IGNORED
from coremill.model.chunked_loss import HeadLoss, chunked_loss, logits_loss, shifted_targets
from coremill.plan import logits


def _problem(rows: int, width: int, vocabulary: int, bias: bool, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(dtype).requires_grad_()
    bias_tensor = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[::5] = IGNORED
    return hidden, weight, bias_tensor, targets


def test_chunks_are_no_larger_than_allowed():
    def rows_of(*sizes: int, trains_weight: bool = True) -> int:
        return logits.chunk_rows_for(*sizes, trains_weight=trains_weight)

    assert rows_of(8193, 128256, 4096, 2) == 2048  # a quarter of the weight's gradient
    assert rows_of(8192, 128256, 4096, 2) == 8192  # less than that gradient's sum in fp32 would be
    assert rows_of(8192, 128256, 4096, 2, trains_weight=False) == 2048  # there is none
    assert rows_of(2049, 128256, 4096, 4) == 1024
    assert rows_of(512, 128256, 512, 4) == logits.MIN_CHUNK_ROWS
    assert rows_of(8192, 1000, 64, 4) == 8192  # CHUNK_BYTES hold them all
    assert rows_of(5, 128256, 4096, 2) == 5
    assert logits.block_rows_for(128256, 16) == 32 and logits.block_rows_for(2**20, 4) == 4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [7, 64, 150])
def test_equals_plain_cross_entropy_in_value_and_gradients(monkeypatch, bias, rows):
    monkeypatch.setattr(logits, "CHUNK_BYTES", 0)
    monkeypatch.setattr(logits, "MIN_CHUNK_ROWS", 64)
    monkeypatch.setattr(logits, "BLOCK_BYTES", 5 * 4 * 101)
    hidden, weight, bias_tensor, targets = _problem(rows, 24, 101, bias, torch.float32)
    inputs = [tensor for tensor in (hidden, weight, bias_tensor) if tensor is not None]
    scale = 1.0 / 37
    plain = (
        F.cross_entropy(F.linear(hidden, weight, bias_tensor), targets, ignore_index=IGNORED, reduction="sum") * scale
    )
    expected = torch.autograd.grad(plain, inputs)
    chunked = chunked_loss(hidden, weight, bias_tensor, targets, scale)
    actual = torch.autograd.grad(chunked * 3.0, inputs)
    torch.testing.assert_close(chunked, plain, rtol=1e-6, atol=0)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs * 3.0, rtol=1e-5, atol=1e-7)


def test_bf16_gradients_are_summed_over_chunks_in_fp32(monkeypatch):
    monkeypatch.setattr(logits, "CHUNK_BYTES", 0)
    monkeypatch.setattr(logits, "MIN_CHUNK_ROWS", 4)
    hidden, weight, _, targets = _problem(64, 16, 33, False, torch.bfloat16)
    chunked_loss(hidden, weight, None, targets, 1.0).backward()
    reference_hidden, reference_weight = (
        hidden.detach().float().requires_grad_(),
        weight.detach().float().requires_grad_(),
    )
    reference = F.cross_entropy(
        F.linear(reference_hidden, reference_weight), targets, ignore_index=IGNORED, reduction="sum"
    )
    reference.backward()
    # One rounding of the sum is 2**-9; sixteen roundings, one per chunk, would be several times that.
    error = (weight.grad.float() - reference_weight.grad).norm() / reference_weight.grad.norm()
    assert error < 6e-3
    assert weight.grad.dtype == torch.bfloat16


def test_all_targets_ignored_gives_zero_loss_and_zero_gradients():
    hidden, weight, _, targets = _problem(9, 8, 11, False, torch.float32)
    result = chunked_loss(hidden, weight, None, torch.full_like(targets, IGNORED), 1.0)
    result.backward()
    assert result.item() == 0.0
    assert hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_a_target_of_vanishing_probability_stays_finite():
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight = torch.eye(2, requires_grad=True)
    result = chunked_loss(hidden, weight, None, torch.tensor([1]), 1.0)
    assert result.item() == pytest.approx(1000.0)


def test_logits_that_are_no_numbers_give_a_loss_that_is_none():
    hidden = torch.tensor([[1.0, 0.0], [float("inf"), 1.0]], requires_grad=True)
    assert not chunked_loss(hidden, torch.eye(2, requires_grad=True), None, torch.tensor([1, 0]), 1.0).isfinite()


def test_shifted_targets_point_at_the_next_token_of_the_same_row():
    labels = torch.tensor([[1, 2, 3], [4, IGNORED, 6]])
    assert shifted_targets(labels).tolist() == [2, 3, IGNORED, IGNORED, 6, IGNORED]


def test_head_returns_the_loss_once_and_logits_otherwise():
    head = torch.nn.Linear(8, 13, bias=False)
    hidden = torch.randn(2, 5, 8)
    labels = torch.randint(0, 13, (2, 5))
    logits = head(hidden)
    head_loss = HeadLoss(head)
    torch.testing.assert_close(head(hidden), logits)
    head_loss.expect(labels, 0.125)
    torch.testing.assert_close(head(hidden), logits_loss(logits, labels, 0.125))
    assert head(hidden).shape == (2, 5, 13)


def test_an_evaluation_makes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise AssertionError("room was made for a gradient")

    monkeypatch.setattr("coremill.model.chunked_loss.give_back_freed", fail)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets = torch.arange(6)
    with torch.no_grad():
        loss = chunked_loss(hidden, weight, None, targets, 1.0)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), targets, reduction="sum").detach())
    with pytest.raises(AssertionError, match="room was made"):
        chunked_loss(hidden, weight, None, targets, 1.0)
