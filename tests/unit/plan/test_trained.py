"""Which parameters patterns mean, and what a plan makes of frozen ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import LLAMA_50M, fleet

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.plan.card import ModelCard, read_card
from coremill.plan.planner import make_plan
from coremill.plan.trained import NamedParameter, frozen_by, is_named, named_by, with_frozen, words_of_frozen

CARD = read_card(config=LLAMA_50M, name="small")
WIDTH, INNER, ROWS = CARD.hidden, CARD.intermediate, CARD.vocabulary_rows


def llama() -> list[NamedParameter]:
    """The parameters of that model, by the names of transformers."""
    kv = CARD.kv_heads * CARD.head_dim
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (kv, WIDTH),
        "self_attn.v_proj": (kv, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    layers = [
        NamedParameter((f"model.layers.{layer}.{name}.weight",), shape)
        for layer in range(CARD.layers)
        for name, shape in shapes.items()
    ]
    table = NamedParameter(("model.embed_tokens.weight",), (ROWS, WIDTH))
    head = [] if CARD.tied else [NamedParameter(("lm_head.weight",), (ROWS, WIDTH))]
    if CARD.tied:
        table = NamedParameter(("model.embed_tokens.weight", "lm_head.weight"), (ROWS, WIDTH))
    return [table, *layers, NamedParameter(("model.norm.weight",), (WIDTH,)), *head]


def frozen_card(*patterns: str) -> ModelCard:
    return with_frozen(CARD, frozen_by(llama(), patterns))


def test_the_list_is_the_whole_model():
    assert sum(parameter.numel for parameter in llama()) == CARD.parameters


def test_patterns_mean_whole_names_and_any_name_of_a_tied_weight():
    assert is_named(["model.layers.3.mlp.up_proj.weight"], ["model.layers.[0-3].*"])
    assert not is_named(["model.layers.13.mlp.up_proj.weight"], ["model.layers.[0-3].*"])
    assert not is_named(["model.layers.3.mlp.up_proj.weight"], ["layers.3.*", "MODEL.*"])
    assert is_named(["model.embed_tokens.weight", "lm_head.weight"], ["lm_head.*"])
    tied = NamedParameter(("model.embed_tokens.weight", "lm_head.weight"), (10, 4))
    other = NamedParameter(("model.norm.weight",), (4,))
    words = words_of_frozen([tied, other], frozen_by([tied, other], ["lm_head.weight"]))
    assert words == (
        "train.freeze: 4 of 44 parameters are trained, 40 are frozen; one weight under several names is frozen as a"
        " whole: model.embed_tokens.weight = lm_head.weight"
    )


@pytest.mark.parametrize(
    ("pattern", "cure"),
    [
        ("model.embed_tokens", "did you mean model.embed_tokens.*?"),
        ("layers.0.*", "did you mean *layers.0.*?"),
        ("model.layer.0.*", "did you mean model.layers.0.*?"),
        ("transformer.h.0.*", "take a name from there"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_what_is_near(pattern: str, cure: str):
    with pytest.raises(InputError) as caught:
        named_by(llama(), ["model.norm.*", pattern], key="train.no_decay")
    message = str(caught.value)
    assert message.startswith(f"train.no_decay: {pattern} matches none of the model's {len(llama())} parameters")
    assert cure in message and "model." in message and caught.value.exit_code == 78


def test_something_has_to_be_trained():
    with pytest.raises(InputError, match="leaves nothing to train"):
        frozen_by(llama(), ["*"])
    assert frozen_by(llama(), []) == []


def test_a_card_without_frozen_parameters_is_as_it_was():
    assert with_frozen(CARD, []) is CARD
    nothing = replace(frozen_card("model.norm.weight"), frozen=None)
    assert nothing == CARD


def test_what_is_frozen_has_no_gradient_no_state_and_fewer_products():
    half = CARD.layers // 2
    lower = "".join(str(layer) for layer in range(half))
    patterns = ("model.embed_tokens.*", f"model.layers.[{lower}].*")
    card = frozen_card(*patterns)
    in_layers = sum(CARD.layer_parameters[:half])
    assert card.trainable_parameters == CARD.parameters - CARD.embedding_parameters - in_layers
    assert card.layers_below_backward == half
    # Forward through all, backward through the upper half and the head.
    head = ROWS * WIDTH
    matmul = CARD.matmul_parameters - head
    attention = CARD.attention_flops_per_token(256)
    expected = 2 * (matmul + head) + attention / 3 + (4 * matmul + attention * 2 / 3) / 2
    expected += 2 * head if CARD.tied else 4 * head
    assert card.flops_per_token(256) == pytest.approx(expected)

    config = RunConfig.model_validate({"train": {"steps": 9, "micro_batch_rows": 2}})
    plan, whole = make_plan(config, fleet(), card), make_plan(config, fleet(), CARD)
    assert plan.memory.steady_step.optimizer < whole.memory.steady_step.optimizer
    assert plan.memory.steady_step.activations < whole.memory.steady_step.activations
    assert plan.step_seconds.total < whole.step_seconds.total
    assert plan.model_flops_per_token < whole.model_flops_per_token
    used = plan.tokens_per_second * plan.model_flops_per_token / plan.matmul_flops_per_second
    before = whole.tokens_per_second * whole.model_flops_per_token / whole.matmul_flops_per_second
    assert used == pytest.approx(before, rel=0.1) and used < 1


def test_frozen_layers_above_something_trained_are_gone_back_through():
    card = frozen_card("model.layers.*")
    assert card.layers_below_backward == 0 and card.share_of_layers_in_backward == 1.0
    saved = 2.0 * (CARD.matmul_parameters - ROWS * WIDTH)  # their weights' gradients, nothing else
    assert card.flops_per_token(64) == pytest.approx(CARD.flops_per_token(64) - saved)


@pytest.mark.parametrize("engine", ["replicate", "shard"])
@pytest.mark.parametrize("patterns", [("model.embed_tokens.*",), ("model.layers.*",), ("*embed*", "*layers*")])
def test_no_plan_of_frozen_parameters_takes_more_than_training_all(engine: str, patterns: tuple[str, ...]):
    config = RunConfig.model_validate(
        {"train": {"steps": 9, "micro_batch_rows": 2}, "parallel": {"engine": engine, "ranks_per_node": 2}}
    )
    for nodes in (1, 2):
        machines = replace(fleet(), nodes=nodes)
        plan, whole = make_plan(config, machines, frozen_card(*patterns)), make_plan(config, machines, CARD)
        assert plan.memory.peak.total <= whole.memory.peak.total
        assert plan.wire_bytes_per_step_per_rank <= whole.wire_bytes_per_step_per_rank
        assert plan.step_seconds.total <= whole.step_seconds.total
