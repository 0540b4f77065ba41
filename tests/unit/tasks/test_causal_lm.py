"""The task computes the model's own loss on every family, by whichever path."""

import pytest
import torch

from coremill.data.loader import Batch
from coremill.tasks.causal_lm import CausalLm, why_not_chunked
from tiny_models import FAMILIES, make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("families")
    return {
        family: AutoModelForCausalLM.from_pretrained(make_model(folder / family, family), attn_implementation="eager")
        for family in FAMILIES
    }


def _batch() -> Batch:
    ids = torch.randint(1, 90, (3, 20), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    labels[1, 5:9] = -100
    return Batch(ids, labels, None, (0, 1, 2))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_and_gradients_are_the_models_own(models, family):
    model, batch = models[family], _batch()
    valid = int((batch.labels[:, 1:] != -100).sum())
    own = model(input_ids=batch.input_ids, labels=batch.labels, use_cache=False).loss
    expected = torch.autograd.grad(own, list(model.parameters()))

    task = CausalLm()
    path = task.prepare(model)
    loss = task.loss(model, batch, 1.0 / valid)
    actual = torch.autograd.grad(loss, list(model.parameters()))

    assert path.value == ("logits" if family == "gemma2" else "chunked"), path.reason
    torch.testing.assert_close(loss, own, rtol=1e-6, atol=0)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-7)


def test_the_reason_names_what_the_model_does_to_its_logits(models):
    assert "changes its logits" in str(why_not_chunked(models["gemma2"]))


def test_perplexity_of_an_absurd_loss_is_infinite_not_an_error():
    assert CausalLm.metric(0.0) == 1.0
    assert CausalLm.metric(1e6) == float("inf")
