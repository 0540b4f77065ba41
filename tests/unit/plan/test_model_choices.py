"""What a plan says of layers it does not know, of masks and matrices, and of whole logits; and that it counts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.plan.card import ModelCard, read_card
from coremill.plan.headers import TensorHeader
from coremill.plan.planner import make_plan
from coremill.plan.types import Plan
from coremill.run.prepare import refuse_what_does_not_fit
from unit.plan.shapes import LLAMA_50M, TINY_CONFIGS, fleet, llama_tensors

UNKNOWN = {"model_type": "brandnew", "vocab_size": 250}


def headers_of(tensors: dict[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    return {name: TensorHeader(name, "F32", shape, "one", 0, 0) for name, shape in tensors.items()}


def plan_of(card: ModelCard, **sections: Any) -> Plan:
    return make_plan(RunConfig.model_validate({"train": {"micro_batch_rows": 2}, **sections}), fleet(), card)


def planned(config: dict[str, Any], **sections: Any) -> Plan:
    return plan_of(read_card(config=config, name="m"), **sections)


def test_a_family_that_is_not_known_is_planned_by_its_tensors_and_said() -> None:
    # No key of its shape is in the config: nothing is taken from Llama's defaults.
    card = read_card(config=UNKNOWN, headers=headers_of(llama_tensors(tied_copy=True)), name="m")
    known = read_card(config=TINY_CONFIGS["llama"], name="m")
    assert (card.hidden, card.intermediate, card.layers, card.vocabulary_rows, card.tied) == (64, 176, 3, 250, False)
    assert card.parameters == known.parameters and card.groups == known.groups
    made = plan_of(card, data={"sequence_length": 128})
    assert made.kept_activations.value == "estimated"
    assert "brandnew" in made.kept_activations.reason and "does not know" in made.kept_activations.reason
    assert any("brandnew" in note for note in made.assumptions)
    # Rather too much than too little, yet of the right size.
    exact = plan_of(known, data={"sequence_length": 128})
    assert exact.kept_activations.value == "counted" and "llama" in exact.kept_activations.reason
    assert not any("family" in note for note in exact.assumptions)
    ratio = made.memory.steady_step.activations / exact.memory.steady_step.activations
    assert 1 < ratio < 2


def test_tensors_with_names_of_their_own_are_told_by_their_shape() -> None:
    tensors = {
        name.replace("model.embed_tokens", "words").replace("lm_head", "out").replace("layers.", "steps."): shape
        for name, shape in llama_tensors(tied_copy=True).items()
    }
    card = read_card(config=UNKNOWN, headers=headers_of(tensors), name="m")
    assert (card.embedding_parameters, card.head_parameters, card.tied) == (250 * 64, 250 * 64, False)
    assert card.layers == 1  # all that has no number: the largest group there can be
    del tensors["out.weight"]
    assert read_card(config=UNKNOWN, headers=headers_of(tensors), name="m").tied
    # A head that the files lack is made at random, and counts.
    untied = read_card(config={**UNKNOWN, "tie_word_embeddings": False}, headers=headers_of(tensors), name="m")
    assert untied.parameters == card.parameters and untied.head_parameters == 250 * 64


def test_without_files_an_unknown_family_is_refused_with_a_reason() -> None:
    with pytest.raises(InputError, match="brandnew") as caught:
        read_card(config={**TINY_CONFIGS["llama"], "model_type": "brandnew"})
    assert caught.value.exit_code == 78 and "does not know" in str(caught.value.why)


def test_recurrent_layers_are_said_to_need_more() -> None:
    config = {**UNKNOWN, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    card = read_card(config=config, headers=headers_of(llama_tensors(tied_copy=True)), name="m")
    assert "recurrent" in plan_of(card, data={"sequence_length": 128}).kept_activations.reason
    with_state = read_card(config={**UNKNOWN, "state_size": 16}, headers=headers_of(llama_tensors()), name="m")
    assert with_state.has_recurrent_layers
    assert (with_state.estimated_numbers or 0) > 4 * 16 * 176


def test_experts_of_an_unknown_family_are_counted_as_routed() -> None:
    tensors = llama_tensors(tied_copy=True)
    tensors |= {f"model.layers.{layer}.mlp.experts.gate_up_proj": (8, 96, 64) for layer in range(3)}
    tensors |= {f"model.layers.{layer}.mlp.experts.down_proj": (8, 64, 48) for layer in range(3)}

    def numbers(routed: int) -> int:
        config = {**UNKNOWN, "num_experts": 8, "num_experts_per_tok": routed}
        return read_card(config=config, headers=headers_of(tensors), name="m").estimated_numbers or 0

    # Inputs and outputs of both products, and the activated gate.
    assert numbers(4) - numbers(2) == 2 * (64 + 96 + 48 + 64 + 176)


def test_documents_apart_cost_a_mask_in_every_layer() -> None:
    across = planned(LLAMA_50M)
    apart = planned(LLAMA_50M, data={"attention_across_documents": False})
    assert "no matrix" in across.attention.reason
    assert "documents are kept apart: 8 layers of 8" in apart.attention.reason
    mask = 2 * 512 * 512 * 4
    assert apart.memory.steady_step.activations - across.memory.steady_step.activations == 8 * mask


def test_a_window_costs_a_mask_where_it_ends_inside_a_row() -> None:
    config = {**LLAMA_50M, "model_type": "mistral", "sliding_window": 256}
    shorter = planned(config, data={"sequence_length": 128})
    longer = planned(config, data={"sequence_length": 512})
    without = planned({**config, "sliding_window": None}, data={"sequence_length": 512})
    assert "no matrix" in shorter.attention.reason and "no matrix" in without.attention.reason
    assert "windows of 256 tokens" in longer.attention.reason
    activations = [one.memory.steady_step.activations for one in (longer, without)]
    assert activations[0] - activations[1] == 8 * 2 * 512 * 512 * 4


def test_only_layers_with_a_window_keep_a_mask() -> None:
    some = {**LLAMA_50M, "model_type": "qwen3", "sliding_window": 256}
    types = ["sliding_attention", "full_attention"] * 4
    assert "4 layers of 8" in planned({**some, "layer_types": types}).attention.reason
    # Qwen counts its window only where it is told to, and from a layer on.
    assert "no matrix" in planned(some).attention.reason
    assert "3 layers of 8" in planned({**some, "use_sliding_window": True, "max_window_layers": 5}).attention.reason


def test_a_family_without_sdpa_keeps_the_matrices_of_its_heads() -> None:
    tensors = headers_of(llama_tensors())
    known_heads = {"num_attention_heads": 4, "tie_word_embeddings": True}
    eager = read_card(config={**UNKNOWN, **known_heads, "model_type": "gptj"}, headers=tensors, name="m")
    quick = read_card(config={**UNKNOWN, **known_heads}, headers=tensors, name="m")
    made, other = (plan_of(card, data={"sequence_length": 128}) for card in (eager, quick))
    assert made.attention.value == "eager" and "gptj has no sdpa form" in made.attention.reason
    assert other.attention.value == "sdpa"
    more = made.memory.steady_step.activations - other.memory.steady_step.activations
    assert more >= 3 * 2 * 4 * 4 * 2 * 128 * 128  # layers, matrices, bytes, heads, rows
    asked = planned(LLAMA_50M, model={"name": "built-in", "attention": "eager"})
    assert (asked.attention.value, asked.attention.reason[:10]) == ("eager", "set by you")


@pytest.mark.parametrize(
    ("changes", "bytes_per_logit"),
    [
        ({"model_type": "granitemoe"}, 12),  # log-probabilities, their gradient, the logits' gradient
        ({"logits_scaling": 8.0}, 12),
        ({"final_logit_softcapping": 30.0}, 16),  # and what tanh keeps
    ],
)
def test_whole_logits_are_in_the_plan_and_said(changes: dict[str, Any], bytes_per_logit: int) -> None:
    made = planned({**LLAMA_50M, **changes})
    assert made.logits.value == "whole"
    assert made.memory.steady_step.logits == 1024 * 16384 * bytes_per_logit
    assert planned(LLAMA_50M).logits.value == "chunked"
    assert planned({**LLAMA_50M, "model_type": "mixtral", "num_local_experts": 4}).logits.value == "chunked"


def test_a_refusal_says_where_its_number_is_an_estimate() -> None:
    card = read_card(config=UNKNOWN, headers=headers_of(llama_tensors(tied_copy=True)), name="m")
    for one, is_said in ((card, True), (read_card(config=TINY_CONFIGS["llama"], name="m"), False)):
        made = replace(plan_of(one, data={"sequence_length": 128}), fits=False, shortfall_bytes=10**9)
        with pytest.raises(InputError) as refused:
            refuse_what_does_not_fit(made, force=False)
        assert ("what layers keep is an estimate" in (refused.value.why or "")) == is_said


@pytest.mark.parametrize("engine", ["replicate", "shard"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_as_transformers_wrote_it_whole_logits_are_counted_and_said(name: str, engine: str) -> None:
    parallel = {"ranks_per_node": 2, "engine": engine}
    sections = {"data": {"sequence_length": 64}, "train": {"micro_batch_rows": 2}, "parallel": parallel}
    config = {**TINY_CONFIGS[name], "vocab_size": 20_000}  # so large that the peak is in the loss
    fused = planned(config, **sections)
    written = planned(config, **sections, model={"fused": False})
    assert written.logits.value == "whole" and written.logits.reason.startswith("off: model.fused is false: 128 x ")
    assert written.memory.steady_step.logits >= 12 * 128 * 20_000
    assert written.memory.steady_step.total >= fused.memory.steady_step.total
    has_rms_norms = name != "gpt2"
    assert written.kept_activations.value == ("estimated" if has_rms_norms else "counted")
    assert any("model.fused is false" in note for note in written.assumptions) == has_rms_norms
    if name == "llama":
        assert "off" not in fused.logits.reason and fused.logits.value == "chunked"
