"""The task computes the model's own loss on every family, by whichever path."""

import os

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coremill.config.schema import DataSection
from coremill.data.loader import FILLER
from coremill.data.packed_batches import Batch
from coremill.plan.logits import makes_whole_logits
from coremill.tasks.causal_lm.loss_path import find_loss_path
from coremill.tasks.causal_lm.training import CausalLmTraining
from tiny_models import FAMILIES, tiny_config

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def model_from(values: dict, **changes):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {**values, **changes}
    torch.manual_seed(3)
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases that are not zero
    return model


def _batch(rows: int = 3) -> Batch:
    ids = torch.randint(1, 90, (rows, 20), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    labels[1, 5:9] = -100
    return Batch(ids, labels, None, tuple(range(rows)))


def valid_targets(batch: Batch) -> int:
    return int((batch.labels[:, 1:] != -100).sum())


def own_loss(model, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch.input_ids, labels=batch.labels, use_cache=False).loss


def assert_same_loss(model, batch: Batch, expected_path: str) -> None:
    own = own_loss(model, batch)
    expected = torch.autograd.grad(own, list(model.parameters()))

    task = CausalLmTraining(DataSection())
    path = task.prepare(model)
    loss = task.loss(model, batch, 1.0 / valid_targets(batch))
    actual = torch.autograd.grad(loss, list(model.parameters()))

    assert path.value == expected_path, path.reason
    torch.testing.assert_close(loss, own, rtol=1e-6, atol=0)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_and_gradients_are_the_models_own(family):
    assert_same_loss(model_from(FAMILIES[family]), _batch(), "logits" if family == "gemma2" else "chunked")


def test_the_reason_names_what_the_model_does_to_its_logits():
    assert "changes its logits" in find_loss_path(model_from(FAMILIES["gemma2"])).reason


@pytest.mark.parametrize("changes", [{}, BALANCED], ids=["plain", "balanced"])
def test_a_mixture_has_the_chunked_loss_and_its_balance(changes):
    model = model_from(tiny_config("mixtral"), **changes)
    assert find_loss_path(model).more == bool(changes)
    assert_same_loss(model, _batch(), "chunked")


def test_a_balance_is_kept_where_logits_are_whole():
    model = model_from(tiny_config("mixtral"), model_type="granitemoe", logits_scaling=7.0, **BALANCED)
    assert find_loss_path(model).more
    assert_same_loss(model, _batch(), "logits")


def test_a_balance_counts_by_the_targets_of_each_micro_batch():
    """Over micro-batches the step has the mean of their own losses, weighted; filler rows change nothing."""
    model = model_from(tiny_config("mixtral"), **BALANCED)
    whole = _batch(rows=4)
    parts = [slice(0, 3), slice(3, 4)]
    micro_batches = [Batch(whole.input_ids[rows], whole.labels[rows], None, (0,)) for rows in parts]
    weights = [valid_targets(each) / valid_targets(whole) for each in micro_batches]
    expected = sum(weight * own_loss(model, each) for weight, each in zip(weights, micro_batches, strict=True))

    nothing = Batch(whole.input_ids[:0], whole.labels[:0], None, ())
    padded = [_with_fillers(each, 3) for each in (*micro_batches, nothing)]
    task = CausalLmTraining(DataSection())
    task.prepare(model)
    losses = [task.loss(model, each, 1.0 / valid_targets(whole)) for each in padded]
    torch.testing.assert_close(sum(losses), expected, rtol=1e-6, atol=0)
    losses[-1].backward()
    assert all(bool((parameter.grad == 0).all()) for parameter in model.parameters() if parameter.grad is not None)


def _with_fillers(batch: Batch, rows: int) -> Batch:
    fillers = rows - len(batch.input_ids)
    ids = torch.cat([batch.input_ids, torch.zeros(fillers, 20, dtype=torch.long)])
    labels = torch.cat([batch.labels, torch.full((fillers, 20), -100)])
    return Batch(ids, labels, None, (*range(len(batch.input_ids)), *[FILLER] * fillers))


def test_an_evaluation_is_of_the_next_token_alone():
    model = model_from(tiny_config("mixtral"), **BALANCED).eval()
    batch = _batch()
    plain = model(input_ids=batch.input_ids, labels=batch.labels, use_cache=False, output_router_logits=False).loss
    task = CausalLmTraining(DataSection())
    task.prepare(model)
    with torch.no_grad():
        torch.testing.assert_close(task.loss(model, batch, 1.0 / valid_targets(batch)), plain, rtol=1e-6, atol=0)


def test_a_cap_that_only_large_logits_meet_is_seen():
    model = model_from(FAMILIES["llama"])
    own = type(model).forward

    def forward(self, **inputs):
        output = own(self, **inputs)
        output.logits = output.logits.clamp(-1e4, 1e4)
        return output

    model.__class__ = type("CappedLlama", (type(model),), {"forward": forward})
    assert not find_loss_path(model).chunked


class ZLossLlama:
    """Adds to its loss without asking its config."""

    def forward(self, labels=None, **inputs):
        output = super().forward(labels=labels, **inputs)
        if labels is not None:
            output.loss = output.loss + 1e-2 * output.logits.float().logsumexp(-1).square().mean()
        return output


def test_a_loss_that_needs_the_logits_again_is_the_models_own():
    model = model_from(FAMILIES["llama"])
    model.__class__ = type("ZLlama", (ZLossLlama, type(model)), {})
    assert_same_loss(model, _batch(), "logits")


class Doubled(nn.Linear):
    """More than a product."""

    def forward(self, input):
        return 2 * super().forward(input)


def test_a_head_that_is_more_than_a_product_stays():
    model = model_from(FAMILIES["llama"])
    head = Doubled(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    assert_same_loss(model, _batch(), "logits")


def test_labels_that_a_model_wants_shifted_come_shifted():
    """BART's decoder compares each row with the label beside it: the next token's, where labels are shifted."""
    values = {"model_type": "bart", "vocab_size": 91, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    model = model_from({**values, "decoder_ffn_dim": 32, "is_decoder": True, "is_encoder_decoder": False, **dropouts})
    batch = _batch()
    shifted = nn.functional.pad(batch.labels[:, 1:], (0, 1), value=-100)
    expected = model(input_ids=batch.input_ids, labels=shifted, use_cache=False).loss
    task = CausalLmTraining(DataSection())
    assert task.prepare(model).value == "chunked"
    torch.testing.assert_close(task.loss(model, batch, 1.0 / valid_targets(batch)), expected, rtol=1e-6, atol=0)


def test_following_leaves_the_model_as_it_was():
    model = model_from(FAMILIES["llama"])
    before = own_loss(model, _batch())
    find_loss_path(model)
    assert "_loss_function" not in model.__dict__ and "forward" not in model.lm_head.__dict__
    assert torch.equal(own_loss(model, _batch()), before)


def test_perplexity_of_an_absurd_loss_is_infinite_not_an_error():
    assert CausalLmTraining(DataSection()).metrics(0.0) == (1.0,)
    assert CausalLmTraining(DataSection()).metrics(1e6) == (float("inf"),)


SAMPLE = ["beam", "cohere", "falcon_h1", "gemma2", "gemma3_text", "granite", "llama", "mixtral", "nanochat", "olmoe"]
LONG = bool(os.environ.get("COREMILL_LONG_TESTS"))


@pytest.mark.parametrize("family", list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if LONG else SAMPLE)
def test_the_plan_knows_who_makes_whole_logits(family):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](), attn_implementation="eager")
    except Exception as error:
        pytest.skip(f"its default config makes no model here: {type(error).__name__}")
    path = find_loss_path(model)
    assert makes_whole_logits(model.config.to_dict(), family) == (not path.chunked), path.reason
