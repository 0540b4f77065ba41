"""Masks from a table are as random as drawn ones: shares, means, gradients, and what they depend on."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from coremill.model.quick_dropout import STRETCH, QuickDropout, _attention, dropped, quicken_dropout

SIZE = 2 * STRETCH + 12345  # stretches that end where the mask ends too


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_asked_share_is_dropped_and_the_mean_stays(share: float) -> None:
    torch.manual_seed(1)
    values = dropped(torch.ones(SIZE), share)
    assert float((values == 0).double().mean()) == pytest.approx(share, abs=2e-3)
    assert float(values.double().mean()) == pytest.approx(1.0, abs=1e-2)
    (kept,) = set(values[values != 0].tolist())
    assert kept == pytest.approx(1 / (1 - share), rel=1e-3)


def test_the_gradient_goes_where_values_went() -> None:
    values = torch.empty(SIZE).uniform_(0.5, 1.5).requires_grad_()  # none is 0, which would look dropped
    result = dropped(values, 0.3)
    (gradient,) = torch.autograd.grad(result.sum(), values)
    assert torch.equal(gradient != 0, result != 0)
    assert torch.allclose(result, values * gradient)


def test_it_depends_on_the_state_of_the_generator_alone() -> None:
    torch.manual_seed(3)
    first, second = dropped(torch.ones(1000), 0.5), dropped(torch.ones(1000), 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, dropped(torch.ones(1000), 0.5)) and not torch.equal(first, second)


def test_neighbours_and_calls_are_independent() -> None:
    torch.manual_seed(5)
    first, second = (dropped(torch.ones(1 << 20), 0.5).double() - 1 for _ in range(2))
    for one, other in ((first, second), (first[1:], first[:-1]), (first[64:], first[:-64])):
        assert abs(float((one * other).mean())) < 5e-3


@pytest.fixture
def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=2
    )
    return BertForSequenceClassification(config)


def test_evaluation_and_expectation_are_torchs(model: BertForSequenceClassification) -> None:
    """Of attention too: the mean over many masks is that of torch's dropout."""
    ids, mask = torch.randint(5, 100, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    mask[0, 12:] = 0
    hidden = model.bert.embeddings(ids).detach()
    layer = model.bert.encoder.layer[0].attention.self
    before = model.eval()(input_ids=ids, attention_mask=mask).logits

    def mean_output() -> torch.Tensor:
        layer.train()
        torch.manual_seed(9)
        with torch.no_grad():
            return torch.stack([layer(hidden)[0] for _ in range(600)]).mean(0)

    drawn = mean_output()
    choice = quicken_dropout(model)
    assert choice is not None and choice.value == "looked up"
    assert any(isinstance(module, QuickDropout) for module in model.modules())
    assert torch.allclose(mean_output(), drawn, atol=0.05)
    assert torch.allclose(model.eval()(input_ids=ids, attention_mask=mask).logits, before, atol=1e-6)


def test_recomputed_activations_get_the_same_masks(model: BertForSequenceClassification) -> None:
    quicken_dropout(model)
    ids, gradients = torch.randint(5, 100, (2, 16)), []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train().zero_grad()
        torch.manual_seed(4)
        model(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))


def test_a_model_without_dropout_is_left_alone() -> None:
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, hidden_dropout_prob=0
    )
    config.attention_probs_dropout_prob = 0.0
    assert quicken_dropout(BertForSequenceClassification(config)) is None


def test_a_query_that_may_see_no_key_leaves_numbers() -> None:
    """Of padding, where windows are narrow and rows differ in length (ModernBERT)."""
    query, key, value = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.tensor([True, True, False, False]).expand(1, 1, 4, 4).clone()
    mask[..., 3, :] = False
    module = torch.nn.Module()
    module.num_key_value_groups = 1  # type: ignore[assignment]
    module.is_causal = False  # type: ignore[assignment]
    attended, _ = _attention(module, query, key, value, mask, dropout=0.5)
    assert attended.isfinite().all()
    gradients = torch.autograd.grad(attended.square().sum(), (query, key, value))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
