"""What must hold for every model, machine and setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.plan.allocator import allocator_of
from coremill.plan.card import ModelCard, read_card
from coremill.plan.engine_cost import StateBytes, cost_of
from coremill.plan.headers import TensorHeader
from coremill.plan.logits import _CAPS, _SCALES
from coremill.plan.memory import MemoryContext, memory_plan
from coremill.plan.planner import make_plan
from coremill.plan.shape import _ATTENTION_DROPOUT, _EXPERTS, _EXPERTS_PER_TOKEN, _HEADS, _RESIDUAL_DROPOUT, HIDDEN
from coremill.plan.time import step_seconds
from coremill.plan.traffic import Traffic, looked_up_parameters
from coremill.plan.types import Arrangement
from coremill.plan.unknown import _STATE_KEYS
from unit.plan.shapes import TINY_CONFIGS, calibration, fleet, llama_tensors, machine

cards = st.builds(
    lambda name, layers, width, vocabulary: _card(name, layers, width, vocabulary),
    st.sampled_from(sorted(TINY_CONFIGS)),
    st.integers(1, 40),
    st.sampled_from([64, 128, 1024, 4096]),
    st.sampled_from([250, 32000, 128256]),
)

arrangements = st.builds(
    Arrangement,
    engine=st.sampled_from(["replicate", "shard"]),
    optimizer=st.sampled_from(["adamw", "adamw-8bit"]),
    update=st.sampled_from(["after", "inside"]),
    dtype=st.sampled_from(["fp32", "bf16"]),
    wire_dtype=st.sampled_from(["auto", "fp32", "bf16"]),
    nodes=st.integers(1, 8),
    ranks_per_node=st.integers(1, 4),
    threads_per_rank=st.integers(1, 8),
    sequence_length=st.sampled_from([16, 64, 128]),
    micro_batch_rows=st.integers(1, 16),
    accumulation_steps=st.integers(1, 8),
    activation_checkpointing=st.booleans(),
    keep_gathered=st.booleans(),
    attention=st.sampled_from(["sdpa", "eager"]),
)

CONTEXT = MemoryContext(
    base_bytes=440_000_000,
    limit_bytes_per_rank=10**12,
    allocator=allocator_of("aarch64", "fp32"),
    saves_during_run=True,
)

quick = settings(max_examples=60, deadline=None)


def _card(name: str, layers: int, width: int, vocabulary: int) -> ModelCard:
    config: dict[str, Any] = dict(TINY_CONFIGS[name])
    gpt2 = config["model_type"] == "gpt2"
    config |= {"n_embd": width, "n_layer": layers} if gpt2 else {"hidden_size": width, "num_hidden_layers": layers}
    return read_card(config={**config, "vocab_size": vocabulary})


def total(card: ModelCard, arrangement: Arrangement) -> int:
    return memory_plan(card, arrangement, CONTEXT).peak.total


def state(card: ModelCard, arrangement: Arrangement) -> StateBytes:
    return cost_of(arrangement).state(card, arrangement)


def traffic_of(card: ModelCard, arrangement: Arrangement) -> Traffic:
    return cost_of(arrangement).traffic(card, arrangement)


@quick
@given(cards, arrangements, st.integers(1, 4))
def test_more_ranks_never_raise_the_state_per_rank(card: ModelCard, arrangement: Arrangement, factor: int) -> None:
    few = replace(arrangement, engine="shard")
    assert state(card, replace(few, nodes=few.nodes * factor)).total <= state(card, few).total


@quick
@given(cards, arrangements, st.integers(1, 4))
def test_from_two_ranks_on_more_never_raise_the_total(card: ModelCard, arrangement: Arrangement, factor: int) -> None:
    few = replace(arrangement, engine="shard", nodes=max(2, arrangement.nodes))
    assert total(card, replace(few, nodes=few.nodes * factor)) <= total(card, few)


@quick
@given(cards, arrangements)
def test_parts_add_up(card: ModelCard, arrangement: Arrangement) -> None:
    memory = memory_plan(card, arrangement, CONTEXT)
    for part in memory.phases.values():
        values = [getattr(part, name) for name in part.__dataclass_fields__]
        assert part.total == sum(values) and min(values) >= 0
    assert memory.peak.total == max(part.total for part in memory.phases.values())


@quick
@given(cards, arrangements)
def test_more_rows_never_need_less(card: ModelCard, arrangement: Arrangement) -> None:
    more = replace(arrangement, micro_batch_rows=arrangement.micro_batch_rows + 1)
    assert total(card, more) >= total(card, arrangement)
    machines = fleet(nodes=arrangement.nodes, rates=calibration(bf16=200e9))
    traffic = traffic_of(card, arrangement)
    if looked_up_parameters(card):  # more tokens name more of its rows
        assert traffic.total <= traffic_of(card, more).total
    else:
        assert traffic == traffic_of(card, more)
    few_seconds = step_seconds(card, arrangement, machines, traffic)
    more_seconds = step_seconds(card, more, machines, traffic)
    assert more_seconds.compute > few_seconds.compute and more_seconds.total >= few_seconds.total


@quick
@given(cards, arrangements)
def test_recomputing_saves_memory_and_costs_time(card: ModelCard, arrangement: Arrangement) -> None:
    keeps = replace(arrangement, activation_checkpointing=False)
    recomputes = replace(arrangement, activation_checkpointing=True)
    if card.layers > 2:
        assert total(card, recomputes) <= total(card, keeps)
    machines = fleet(nodes=arrangement.nodes, rates=calibration(bf16=200e9))
    traffic = traffic_of(card, arrangement)
    slower, quicker = (step_seconds(card, one, machines, traffic).compute for one in (recomputes, keeps))
    assert slower > quicker


@quick
@given(cards, st.integers(1, 6), st.integers(1, 8), st.sampled_from([16, 64, 128]), st.integers(1, 64))
def test_a_plan_is_the_same_on_every_rank(card: ModelCard, nodes: int, cores: int, length: int, rows: int) -> None:
    machines = fleet(nodes=nodes, node=machine(cores=cores))
    config = RunConfig.model_validate(
        {"data": {"sequence_length": length}, "train": {"tokens_per_step": length * rows}}
    )
    made = make_plan(config, machines, card)
    assert made == make_plan(config, machines, card)
    assert made.rows_per_step == rows
    rank_rows = -(-rows // made.world_size)
    passes, size = made.accumulation_steps.value, made.micro_batch_rows.value
    assert (passes - 1) * size < rank_rows <= passes * size
    assert made.fits == (made.memory.peak.total <= made.memory.limit) == (made.shortfall_bytes == 0)


KEYS = sorted(
    {*HIDDEN, *_HEADS, *_EXPERTS, *_EXPERTS_PER_TOKEN, *_ATTENTION_DROPOUT, *_RESIDUAL_DROPOUT, *_STATE_KEYS}
    | {*_CAPS, *_SCALES, "head_dim", "num_hidden_layers", "intermediate_size", "num_key_value_heads", "vocab_size"}
    | {"max_position_embeddings", "n_positions", "tie_word_embeddings", "attention_bias", "mlp_bias", "qk_layernorm"}
    | {"embd_pdrop", "use_parallel_residual", "hidden_act", "moe_intermediate_size", "text_config", "mlp_only_layers"}
    | {"decoder_sparse_step", "sliding_window", "sliding_window_pattern", "attention_chunk_size", "layer_types"}
    | {"use_sliding_window", "max_window_layers", "attn_logit_softcapping", "model_type"}
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["", "LLLG", "16", "silu"]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inside, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*sorted(TINY_CONFIGS), "exaone4", "mamba"]),
    st.dictionaries(st.sampled_from(KEYS), anything, min_size=1, max_size=3),
    st.booleans(),
)
def test_no_value_of_a_config_ends_a_plan_in_a_traceback(name: str, odd: dict[str, Any], has_weights: bool) -> None:
    plain = TINY_CONFIGS.get(name, {**TINY_CONFIGS["llama"], "model_type": name})
    positions = "n_positions" if "n_positions" in plain else "max_position_embeddings"
    config = {**plain, positions: 4096, **odd}
    tensors = llama_tensors(tied_copy=True)
    headers = {each: TensorHeader(each, "F32", shape, "one", 0, 4) for each, shape in tensors.items()}
    try:
        card = read_card(config=config, headers=headers if has_weights else None)
        make_plan(RunConfig(), fleet(), card).to_json()
    except InputError:
        pass  # in words


def test_a_head_that_stays_in_fp32_is_whole_on_every_rank() -> None:
    card = read_card(config={**TINY_CONFIGS["llama"], "vocab_size": 32000})
    keeps = replace(card, family="hy_v4")
    arrangement = Arrangement(
        engine="shard",
        optimizer="adamw",
        dtype="bf16",
        wire_dtype="auto",
        nodes=2,
        ranks_per_node=2,
        threads_per_rank=1,
        sequence_length=16,
        micro_batch_rows=1,
        accumulation_steps=1,
        activation_checkpointing=False,
        keep_gathered=False,
        attention="eager",
    )
    more = card.head_parameters * 3 // 4  # than a fourth of it
    assert state(keeps, arrangement).parameters - state(card, arrangement).parameters == 4 * more
    assert state(keeps, arrangement).optimizer - state(card, arrangement).optimizer == 8 * more
    assert state(keeps, arrangement).gradients - state(card, arrangement).gradients == 4 * more
    assert total(keeps, arrangement) - total(card, arrangement) >= 16 * more
    for like_others in (replace(arrangement, dtype="fp32"), replace(arrangement, engine="replicate")):
        assert state(keeps, like_others).parameters == state(card, like_others).parameters
    tied = replace(keeps, tied=True)
    assert state(tied, arrangement).parameters == state(card, arrangement).parameters
