"""Attention whose backward is products: gradients beside double precision, and where it is left alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from coremill.model import quick_attention
from coremill.model.quick_attention import BLOCK, attention_backward, quicken_attention
from coremill.train.watched_step import WatchedStep
from tiny_models import make_model

SCALE = 0.3


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_attention, "read_isa", lambda mask: ("amx_bf16",))


def by_eager_attention(gradient: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As transformers writes it: scores and probabilities in the model's dtype, a softmax of bf16 in fp32."""
    query, key, value = (each.detach().requires_grad_() for each in inputs)
    sharing, tokens = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(sharing, 1).transpose(2, 3) * SCALE
    scores = scores + torch.full((tokens, tokens), float("-inf"), dtype=scores.dtype).triu(1)
    wide = torch.float32 if scores.dtype == torch.bfloat16 else scores.dtype
    result = torch.softmax(scores, -1, dtype=wide).to(scores.dtype) @ value.repeat_interleave(sharing, 1)
    return torch.autograd.grad(result, (query, key, value), gradient)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("steepness", [1.0, 3.0])
@pytest.mark.parametrize(
    ("heads", "key_heads", "tokens", "width"),
    [(2, 2, 16, 8), (4, 2, BLOCK, 16), (6, 2, BLOCK + 1, 16), (3, 3, 2 * BLOCK + 40, 32), (9, 1, 60, 64)],
)
def test_gradients_are_as_near_to_exact_as_those_of_eager_attention(
    heads: int, key_heads: int, tokens: int, width: int, steepness: float
) -> None:
    torch.manual_seed(0)
    shapes = ((2, heads, tokens, width), (2, key_heads, tokens, width), (2, key_heads, tokens, width))
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    inputs[0] = inputs[0] * steepness
    gradient = torch.randn(shapes[0]).bfloat16()
    exact = by_eager_attention(gradient.double(), *(each.double() for each in inputs))
    eager = by_eager_attention(gradient, *inputs)
    for found, right, other in zip(attention_backward(gradient, *inputs, SCALE), exact, eager, strict=True):
        assert found.shape == right.shape and found.dtype == torch.bfloat16
        assert error(found, right) < max(0.008, 1.3 * error(other, right))


@pytest.mark.parametrize("shift", [5.0, 100.0, 400.0])
def test_what_keys_have_in_common_costs_nothing(shift: float) -> None:
    """As a bias of keys makes it: scores of hundreds, rounded to whole numbers, whose differences are what counts."""
    torch.manual_seed(0)
    query, key, value, gradient = (torch.randn(1, 4, 2 * BLOCK, 64) for _ in range(4))
    query[..., 5] += 10
    key[..., 5] += shift
    inputs = [each.bfloat16() for each in (query, key, value)]
    gradient = gradient.bfloat16()
    exact = by_eager_attention(gradient.double(), *(each.double() for each in inputs))
    for found, right in zip(attention_backward(gradient, *inputs, SCALE), exact, strict=True):
        assert error(found, right) < 0.03


def gradients(model: torch.nn.Module, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss), torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_a_model_learns_the_same(tmp_path, matrix_units, family: str, checkpointing: bool) -> None:
    make_model(tmp_path, family)
    ids = torch.arange(64).remainder(50).view(2, 32)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    _, right = gradients(exact, ids)
    loss, before = gradients(model, ids)
    assert quicken_attention(model) is not None
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    with WatchedStep() as watched:
        again, after = gradients(model, ids)
    assert again == loss, "forward is torch's own"
    assert error(after, right) < 1.3 * error(before, right) + 1e-4
    assert watched.seconds["attention"] > 0
    if not checkpointing or family != "gpt2":  # of GPT-2 attention has its own share of dropout
        assert not torch.equal(after, before), "it was not used"


def test_other_models_masks_and_dtypes_are_left_alone(tmp_path, matrix_units) -> None:
    make_model(tmp_path, "llama")
    ids = torch.arange(64).remainder(50).view(2, 32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    _, before = gradients(model, ids)
    assert quicken_attention(AutoModelForCausalLM.from_pretrained(tmp_path)) is not None
    _, beside = gradients(model, ids)
    assert torch.equal(beside, before)

    single = AutoModelForCausalLM.from_pretrained(tmp_path)
    _, before = gradients(single, ids)
    quicken_attention(single)
    _, after = gradients(single, ids)
    assert torch.equal(after, before)

    quicken_attention(model)
    padded = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones_like(ids).index_fill_(1, torch.tensor(0), 0),
    }
    with WatchedStep():
        assert torch.isfinite(model(**padded).loss)


def test_without_matrix_units_nothing_is_changed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(quick_attention, "read_isa", lambda mask: ("avx512_bf16", "avx512f"))
    make_model(tmp_path, "llama")
    assert quicken_attention(AutoModelForCausalLM.from_pretrained(tmp_path)) is None
