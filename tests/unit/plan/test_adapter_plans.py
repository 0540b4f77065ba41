"""Plans of runs that train adapters beside a model: what they hold, send, compute and save, and what is said of it."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console
from shapes import GIB, LLAMA_3_8B, LLAMA_50M, fleet, machine, with_memory

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.hardware.facts import Fleet
from coremill.hardware.instances import fleet_of
from coremill.plan.adapters import adapted_by, with_adapters, with_usual_adapters, words_of_wide_adapters
from coremill.plan.card import ModelCard, fully_trained, read_card
from coremill.plan.engine_cost import cost_of
from coremill.plan.planner import candidates_of, make_plan
from coremill.plan.pricing import Candidate
from coremill.plan.stored import plan_from_json
from coremill.plan.trained import NamedParameter
from coremill.plan.types import Plan
from coremill.report.plan_screen import render_plan

LLAMA = read_card(config=LLAMA_3_8B, name="Llama-3-8B")
SMALL = read_card(config=LLAMA_50M, name="small")
OF_TWO = "an adapter of one of the two could not be merged: the other would change with it"
ADAPTERS_OF_8B = 41_943_040  # rank 16 beside all linear maps of Llama-3-8B


def parameters_of(card: ModelCard) -> list[NamedParameter]:
    width, kv, inner = card.hidden, card.kv_heads * card.head_dim, card.intermediate
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    layers = [
        NamedParameter((f"model.layers.{layer}.{name}.weight",), shape, is_linear=len(shape) == 2)
        for layer in range(card.layers)
        for name, shape in shapes.items()
    ]
    ends = [NamedParameter((f"{name}.weight",), (card.vocabulary_rows, width)) for name in ("model.embed_tokens",)]
    head = NamedParameter(("lm_head.weight",), (card.vocabulary_rows, width), is_linear=True)
    return [*ends, *layers, NamedParameter(("model.norm.weight",), (width,)), head]


def config(lora: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"lora": {"rank": 16} if lora is None else lora, "train": {"steps": 50}} | sections)


def adapted(card: ModelCard, settings: RunConfig) -> ModelCard:
    parameters = parameters_of(card)
    return with_adapters(card, parameters, adapted_by(parameters, settings.lora))


def plan(some_fleet: Fleet, card: ModelCard = LLAMA, **sections: Any) -> Plan:
    settings = config(**sections)
    return make_plan(settings, some_fleet, adapted(card, settings))


def priced(some_fleet: Fleet, engine: str, card: ModelCard = LLAMA, **parallel: Any) -> tuple[Candidate, ModelCard]:
    settings = config(parallel={"engine": engine, **parallel})
    beside = adapted(card, settings)
    return candidates_of(settings, some_fleet, beside)[0], beside


def test_the_usual_adapters_are_those_of_all_linear_maps() -> None:
    exact, about = adapted(LLAMA, config()), with_usual_adapters(LLAMA, 16)
    assert exact.adapters is not None and exact.adapters.total == ADAPTERS_OF_8B
    assert about == exact


def test_a_base_is_multiplied_four_times_and_adapters_six() -> None:
    card = adapted(LLAMA, config())
    expected = 4 * LLAMA.matmul_parameters + LLAMA.attention_flops_per_token(512) + 6 * ADAPTERS_OF_8B
    assert card.flops_per_token(512) == pytest.approx(expected)
    assert 0.66 < card.flops_per_token(512) / LLAMA.flops_per_token(512) < 0.69


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_ranks_of_a_host_hold_one_base_in_the_compute_dtype_and_each_a_share_of_the_adapters(
    dtype: str, width: int
) -> None:
    one, card = priced(fleet_of("1xc7i.48xlarge"), "replicate", dtype=dtype, ranks_per_node=4)
    state = cost_of(one.arrangement).state(card, one.arrangement)
    assert state.base == width * LLAMA.parameters // 4
    copies = 4 + (2 if dtype == "bf16" else 0)
    assert state.parameters == state.base + copies * ADAPTERS_OF_8B // 4
    assert (state.gradients, state.optimizer) == (4 * ADAPTERS_OF_8B // 4, 8 * ADAPTERS_OF_8B // 4)


def test_over_hosts_replicate_holds_it_on_each_and_sends_gradients_of_adapters_alone() -> None:
    one, card = priced(fleet_of("2xc7i.8xlarge"), "replicate")
    state = cost_of(one.arrangement).state(card, one.arrangement)
    assert state.base == 2 * LLAMA.parameters
    assert one.traffic.wire_bytes == one.arrangement.sent_bytes(ADAPTERS_OF_8B)


def test_over_hosts_shard_holds_a_part_and_gathers_it_twice() -> None:
    one, card = priced(fleet_of("2xc7i.8xlarge"), "shard", keep_gathered=False)
    state = cost_of(one.arrangement).state(card, one.arrangement)
    assert state.base == LLAMA.parameters  # half of them, two bytes each
    assert state.optimizer == 8 * ADAPTERS_OF_8B // 2
    passes = one.arrangement.accumulation_steps
    in_layers = 2 * sum(LLAMA.layer_parameters)  # forward and backward, bf16, half of them from the other
    assert one.traffic.gather_bytes > passes * in_layers
    assert one.traffic.reduce_bytes == passes * one.arrangement.sent_bytes(ADAPTERS_OF_8B) // 2


@pytest.mark.parametrize("engine", ["replicate", "shard"])
def test_a_checkpoint_has_the_size_of_the_adapters(engine: str) -> None:
    one, card = priced(fleet_of("1xc7i.48xlarge"), engine, ranks_per_node=2)
    assert cost_of(one.arrangement).saved_bytes(card, one.arrangement) == 12 * ADAPTERS_OF_8B


def test_an_8b_model_fits_into_40_gb_and_says_what_full_training_would_need() -> None:
    made = plan(fleet_of("1xc7i.8xlarge"))
    assert made.fits and made.memory.peak.total < 40e9 and not made.activation_checkpointing.value
    assert made.memory.load.total < 1.1 * 2 * LLAMA.parameters
    assert made.micro_batch_rows.value * made.sequence_length == 2048
    assert "larger ones bring no speed" in made.micro_batch_rows.reason
    full = made.full_training
    assert full is not None and not full.fits and full.total_bytes_per_rank > 100e9
    whole = make_plan(config({}), fleet_of("1xc7i.8xlarge"), LLAMA, with_remedies=False)
    assert (full.total_bytes_per_rank, full.tokens_per_second) == (whole.memory.peak.total, whole.tokens_per_second)
    assert made.tokens_per_second > 1.2 * full.tokens_per_second


def test_a_plan_with_adapters_survives_its_json_form_and_others_do_not_change() -> None:
    made = plan(fleet_of("1xc7i.8xlarge"))
    assert plan_from_json(json.loads(json.dumps(made.to_json()))) == made
    assert "full_training" not in make_plan(config({}), fleet(), SMALL).to_json()


def test_the_engine_of_several_ranks_is_chosen_with_a_reason_of_its_own() -> None:
    together = plan(fleet_of("2xc7i.8xlarge"))
    assert together.engine.value == "replicate"
    assert "lies once on each machine" in together.engine.reason and "16.1 GB" in together.engine.reason
    tight = with_memory(fleet_of("4xc7i.8xlarge"), 16 * GIB)
    made = plan(tight, data={"sequence_length": 128}, train={"steps": 5, "tokens_per_step": 4096})
    assert made.engine.value == "shard" and "do not fit into one machine" in made.engine.reason


def test_few_targets_keep_less_and_dropout_keeps_more() -> None:
    def kept(**lora: Any) -> int:
        settings = config({"rank": 16, **lora}, train={"micro_batch_rows": 1, "activation_checkpointing": False})
        return candidates_of(settings, fleet(), adapted(SMALL, settings))[0].memory.steady_step.activations

    assert kept(target_modules=["q_proj", "v_proj"]) < kept() < kept(dropout=0.05)
    # Layers below the first adapter keep nothing, whatever they have no gradients of.
    last, last_two = ([f"*layers.{layer}.*" for layer in range(8 - count, 8)] for count in (1, 2))
    of_one_layer = kept(target_modules=last_two) - kept(target_modules=last)
    assert of_one_layer > 0
    assert kept() - kept(target_modules=last) == pytest.approx(7 * of_one_layer, rel=0.01)


def test_adapters_are_a_remedy_that_can_be_followed() -> None:
    machines = fleet_of("1xc7i.8xlarge")
    settings = config({}, model={"name": "owner/llama"})
    made = make_plan(settings, machines, LLAMA)
    assert not made.fits
    remedy = next(one for one in made.remedies if one.settings == ("lora.rank=16",))
    followed = make_plan(config(model={"name": "owner/llama"}), machines, adapted(LLAMA, config()))
    assert followed.fits
    assert remedy.total_bytes_per_rank == pytest.approx(followed.memory.peak.total, rel=0.01)
    assert remedy.tokens_per_second == pytest.approx(followed.tokens_per_second, rel=0.01)
    # Of a model that has learned nothing yet there is nothing to adapt.
    for nothing_learned in ({"name": "built-in"}, {"name": "owner/llama", "weights": "random"}):
        others = make_plan(config({}, model=nothing_learned), machines, LLAMA).remedies
        assert all("lora" not in setting for one in others for setting in one.settings)


def test_the_screen_says_what_is_trained_and_what_full_training_would_need() -> None:
    settings = config()
    card = adapted(LLAMA, settings)
    screen = io.StringIO()
    made = make_plan(settings, fleet_of("1xc7i.8xlarge"), card)
    render_plan(made.to_json(), asdict(card), Console(file=screen, width=200))
    text = screen.getvalue()
    assert "8.03 B parameters (41.9 M trained beside them in adapters of rank 16)" in text
    assert "all 8.03 B parameters trained instead, without adapters:" in text and "does not fit" in text
    assert fully_trained(card) == LLAMA


def test_micro_batches_without_matrix_units_are_as_before() -> None:
    made = plan(fleet(), SMALL)
    assert made.micro_batch_rows.value * made.sequence_length <= 1024


def test_bf16_is_the_last_remedy_where_the_cpu_has_no_units_for_it() -> None:
    small = fleet(node=machine(memory_gib=25))
    llama = {"name": "owner/llama"}
    full = make_plan(config({}, model=llama), small, LLAMA)
    assert full.dtype.value == "fp32" and not full.fits
    last = full.remedies[-1]
    assert last.settings == ("lora.rank=16", "parallel.dtype=bf16")
    assert "no units" in last.change and "300 times slower than in fp32" in last.change
    assert last.tokens_per_second == min(remedy.tokens_per_second for remedy in full.remedies)
    beside = plan(small, model=llama)
    assert not beside.fits and beside.remedies[-1].settings == ("parallel.dtype=bf16",)
    assert beside.remedies[-1].total_bytes_per_rank == pytest.approx(last.total_bytes_per_rank, rel=0.01)
    followed = plan(small, model=llama, parallel={"dtype": "bf16"})
    assert followed.fits and followed.tokens_per_second == pytest.approx(last.tokens_per_second, rel=0.01)
    # Where adapters in fp32 are enough, nobody needs the slow way; what runs in bf16 already has no such remedy.
    roomy = make_plan(config({}, model=llama), fleet(node=machine(memory_gib=60)), LLAMA)
    changes = [remedy.settings for remedy in roomy.remedies]
    assert ("lora.rank=16",) in changes and ("lora.rank=16", "parallel.dtype=bf16") not in changes
    other = make_plan(config({}, model=llama), fleet_of("1xc7i.8xlarge"), LLAMA)
    assert all("parallel.dtype=bf16" not in remedy.settings for remedy in other.remedies)


def test_adapters_wider_than_the_model_are_warned_of() -> None:
    assert words_of_wide_adapters(SMALL) is None and words_of_wide_adapters(adapted(SMALL, config())) is None
    words = words_of_wide_adapters(adapted(SMALL, config({"rank": 9999})))
    assert words is not None and f"lora.rank 9,999 exceeds the model's width of {SMALL.hidden:,}" in words


@pytest.mark.parametrize(
    ("lora", "why", "do"),
    [
        ({"target_modules": ["embed_tokens"]}, "they end in up, down, lm_head", "take names from there"),
        ({"target_modules": ["all-linear"]}, "they end in up, down, lm_head", "leave lora.target_modules out"),
        ({"modules_to_save": ["hed"]}, "they end in model, layers, up, down, lm_head, embed_tokens", "lm_head"),
        ({"target_modules": ["lm_head"]}, OF_TWO, "lora.modules_to_save: [lm_head]"),
    ],
)
def test_names_that_mean_nothing_say_what_there_is(lora: dict[str, Any], why: str, do: str) -> None:
    """A table that a head has in common is no linear map, and the number of a layer no name."""
    tied = [
        NamedParameter(("model.layers.0.up.weight",), (10, 6), is_linear=True),
        NamedParameter(("model.layers.0.down.weight",), (6, 10), is_linear=True),
        NamedParameter(("lm_head.weight", "model.embed_tokens.weight"), (11, 6), is_linear=True),
    ]
    with pytest.raises(InputError) as caught:
        adapted_by(tied, config({"rank": 2, **lora}).lora)
    assert caught.value.why == why
    assert do in str(caught.value.do)
