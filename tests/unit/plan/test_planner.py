from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.hardware.facts import Fleet
from coremill.hardware.instances import fleet_of
from coremill.plan.card import read_card
from coremill.plan.compare import compare_fleets, usd_per_million_tokens
from coremill.plan.dtype import choose_dtype, words_of_emulated_bf16
from coremill.plan.engine_cost import cost_of
from coremill.plan.length import steps_of_epochs
from coremill.plan.planner import candidates_of, make_plan
from coremill.plan.stored import plan_from_json
from coremill.plan.types import Plan
from coremill.supervise.rank_environment import oversubscription_note
from unit.plan.shapes import GIB, LLAMA_3_8B, LLAMA_50M, calibration, fleet, machine, with_memory

SMALL = read_card(config=LLAMA_50M, name="small")
LLAMA = read_card(config=LLAMA_3_8B, name="Llama-3-8B")


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def plan(some_fleet: Fleet | None = None, **sections: Any) -> Plan:
    return make_plan(config(**sections), some_fleet or fleet(), SMALL)


def test_one_small_machine() -> None:
    made = plan()
    assert made.fits
    assert (made.engine.value, made.dtype.value, made.world_size) == ("replicate", "fp32", 1)
    assert made.threads_per_rank.value == 2
    assert made.cpus_of_rank == ((0, 1),)
    assert made.rows_per_step == 32
    assert made.micro_batch_rows.value * made.accumulation_steps.value == 32
    assert made.wire_bytes_per_step_per_rank == 0
    assert not made.activation_checkpointing.value
    assert all(choice.reason for choice in (made.engine, made.dtype, made.wire_dtype, made.ranks_per_node))
    assert made.usd_per_hour is None and made.to_json()["usd"] is None


def test_the_plan_survives_its_json_form() -> None:
    made = make_plan(config(train={"steps": 3}), fleet_of("2xc7i.8xlarge"), LLAMA)
    assert plan_from_json(json.loads(json.dumps(made.to_json()))) == made


def test_what_the_user_fixed_is_kept() -> None:
    made = plan(
        parallel={"engine": "shard", "ranks_per_node": 4, "threads_per_rank": 1, "wire_dtype": "fp32", "dtype": "fp32"},
        train={"micro_batch_rows": 3, "activation_checkpointing": True},
    )
    assert (made.engine.value, made.ranks_per_node.value, made.threads_per_rank.value) == ("shard", 4, 1)
    assert (made.micro_batch_rows.value, made.accumulation_steps.value) == (3, 3)  # 8 rows per rank
    assert made.activation_checkpointing.value and made.wire_dtype.value == "fp32"
    fixed = (
        made.engine,
        made.ranks_per_node,
        made.threads_per_rank,
        made.micro_batch_rows,
        made.activation_checkpointing,
    )
    assert all(choice.reason.startswith("set by you") for choice in fixed)
    assert "share 2 cores" in made.ranks_per_node.reason


def test_a_micro_batch_larger_than_a_ranks_rows_is_cut_and_said() -> None:
    made = plan(train={"micro_batch_rows": 64})
    assert made.micro_batch_rows.value == 32
    assert "64" in made.micro_batch_rows.reason


def test_tokens_that_are_no_whole_rows_are_said() -> None:
    made = plan(train={"tokens_per_step": 1500}, data={"sequence_length": 512})
    assert made.rows_per_step == 2
    assert "476 left over" in made.accumulation_steps.reason


def test_more_ranks_than_rows_is_said() -> None:
    made = plan(train={"tokens_per_step": 512}, parallel={"ranks_per_node": 2})
    assert "1 ranks have no row" in made.accumulation_steps.reason


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"train": {"tokens_per_step": 100}, "data": {"sequence_length": 128}}, "train.tokens_per_step"),
        ({"data": {"sequence_length": 4096}}, "data.sequence_length: 4096"),
        ({"parallel": {"ranks_per_node": 1000}}, "parallel.ranks_per_node"),
        ({"parallel": {"threads_per_rank": 1000}}, "parallel.threads_per_rank"),
    ],
)
def test_what_cannot_be_is_one_clear_error(sections: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(**sections)
    assert caught.value.where == where
    assert caught.value.exit_code == 78


def test_dtype_follows_units_and_measurement() -> None:
    amx = machine(isa=("amx_bf16",))
    assert choose_dtype("auto", amx, calibration(fp32=1.4e12, bf16=4.3e12)).value == "bf16"
    assert "3.1 times" in choose_dtype("auto", amx, calibration(fp32=1.4e12, bf16=4.3e12)).reason
    slow = choose_dtype("auto", amx, calibration(fp32=1.4e12, bf16=1.2e12))
    assert slow.value == "fp32" and "0.86" in slow.reason
    assert choose_dtype("auto", amx, calibration()).value == "fp32"
    without = choose_dtype("auto", machine(), calibration())
    assert without.value == "fp32" and "300 times slower" in without.reason
    asked = choose_dtype("bf16", machine(), calibration())
    assert asked.value == "bf16"
    warning = words_of_emulated_bf16(asked, machine(), calibration())
    assert warning is not None and "300 times slower" in warning
    assert words_of_emulated_bf16(without, machine(), calibration()) is None
    assert words_of_emulated_bf16(asked, amx, calibration(fp32=1.4e12, bf16=1.2e12)) is None


def test_a_measured_slowdown_is_quoted() -> None:
    class Emulated:
        source = "measured"
        fp32_matmul_flops_per_second = 72e9
        bf16_matmul_flops_per_second = None
        bf16_emulated_flops_per_second = 0.18e9

    reason = choose_dtype("auto", machine(), Emulated()).reason  # type: ignore[arg-type]
    assert "400 times slower" in reason and "measured" in reason


def test_one_rank_per_numa_node_with_its_own_cores() -> None:
    made = plan(fleet(node=machine(cores=8, numa_nodes=2, threads_per_core=2)))
    assert made.ranks_per_node.value == 2 and made.threads_per_rank.value == 4
    assert made.cpus_of_rank == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_few_cores_of_another_numa_node_do_not_idle_the_others() -> None:
    """`taskset -c 0-17` of 2 x 16 cores."""
    node = machine(cores=32, numa_nodes=2)
    made = plan(fleet(node=replace(node, cores=node.cores[:18])))
    assert (made.ranks_per_node.value, made.threads_per_rank.value) == (1, 18)
    assert "NUMA nodes of 16 and 2 cores" in made.ranks_per_node.reason
    made = plan(fleet(node=replace(node, cores=node.cores[:28])))
    assert (made.ranks_per_node.value, made.threads_per_rank.value) == (2, 12)


def test_a_cpu_quota_takes_threads_evenly_on_all_cores() -> None:
    """The kernel finds free ones: containers with a quota each would all be on the first cores."""
    quota = replace(machine(cores=8, numa_nodes=2), cpu_quota=4.5)
    made = plan(fleet(node=quota))
    assert made.threads_per_rank.value == 2 and made.cpus_of_rank == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert "the CPU quota pays for 4 of 8 cores" in made.threads_per_rank.reason
    one_node = fleet(node=replace(machine(cores=8), cpu_quota=4.0))
    for ranks, cpus in ((1, (tuple(range(8)),)), (2, ((0, 1, 2, 3), (4, 5, 6, 7)))):
        made = plan(one_node, parallel={"ranks_per_node": ranks})
        assert made.threads_per_rank.value * ranks == 4 and made.cpus_of_rank == cpus
    # One thread stays with the memory of its NUMA node.
    assert plan(fleet(node=replace(quota, cpu_quota=1.5))).cpus_of_rank == ((0, 1, 2, 3),)
    crowded = plan(one_node, parallel={"ranks_per_node": 8})
    assert "8 ranks" in str(oversubscription_note(crowded)) and "4 CPUs" in str(oversubscription_note(crowded))


def test_more_ranks_than_cores_share() -> None:
    made = plan(parallel={"ranks_per_node": 4})
    assert made.cpus_of_rank == ((0,), (0,), (1,), (1,)) and made.threads_per_rank.value == 1


def test_replicate_gives_way_to_shard_when_memory_ends() -> None:
    wide = plan(fleet(nodes=2))
    assert wide.engine.value == "replicate"
    tight = plan(with_memory(fleet(nodes=2), int(1.45 * GIB)))
    assert tight.engine.value == "shard" and tight.fits
    assert "do not fit" in tight.engine.reason


def test_checkpointing_only_when_it_must() -> None:
    long_rows = {"data": {"sequence_length": 2048}}
    assert not plan(**long_rows).activation_checkpointing.value
    needed = plan(**long_rows).memory.peak.total
    tight = plan(with_memory(fleet(), int(needed * 0.8) + 128 * 2**20), **long_rows)
    assert tight.fits and tight.activation_checkpointing.value
    assert "third more" in tight.activation_checkpointing.reason


def test_wire_bytes_by_engine_and_dtype() -> None:
    def made(engine: str, wire_dtype: str, nodes: int = 1) -> Plan:
        parallel = {"ranks_per_node": 4 // nodes, "engine": engine, "wire_dtype": wire_dtype}
        return plan(fleet(nodes=nodes), parallel=parallel)

    def wire(engine: str, wire_dtype: str, nodes: int = 1) -> int:
        return made(engine, wire_dtype, nodes).wire_bytes_per_step_per_rank

    count, table = SMALL.parameters, SMALL.vocabulary_rows * SMALL.hidden
    root = 2 + 4 / 1024  # 16 bits, and a scale for 1024 of them
    # Of the lookup table only the rows that tokens name.
    for wire_dtype, nodes, each in (("fp32", 4, 4), ("auto", 4, root)):
        least = 2 * 3 / 4 * each * (count - table)
        assert least < wire("replicate", wire_dtype, nodes) < least + 2 * 3 / 4 * each * table / 2
    # A step of many tokens names most of them: it is sent whole.
    wired = {"engine": "replicate", "wire_dtype": "fp32"}
    many = plan(fleet(nodes=4), parallel=wired, train={"tokens_per_step": 2**20})
    assert many.wire_bytes_per_step_per_rank == pytest.approx(2 * 3 / 4 * 4 * count, rel=1e-3)
    # Memory is plenty: gathered once in fp32, gradients once.
    for wire_dtype, nodes, both in (("fp32", 4, 8), ("auto", 4, 4 + root), ("bf16", 1, 4)):
        sharded = made("shard", wire_dtype, nodes)
        tokens = sharded.rows_per_step // 4 * sharded.sequence_length
        least = 3 / 4 * both * (count - table)
        assert least < sharded.wire_bytes_per_step_per_rank < least + 3 / 4 * both * tokens * SMALL.hidden / 2


def test_ranks_of_one_machine_that_shard_share_memory() -> None:
    made = plan(parallel={"ranks_per_node": 4, "engine": "shard", "keep_gathered": True}, train={"micro_batch_rows": 1})
    passes = made.accumulation_steps.value
    assert passes > 1 and made.wire_bytes_per_step_per_rank == 0
    # Weights once, gradients after every pass.
    assert made.shared_bytes_per_step_per_rank == pytest.approx(3 / 4 * 4 * SMALL.parameters * (1 + passes))


def test_the_wire_is_exact_inside_a_machine_and_narrow_between_machines() -> None:
    assert plan().wire_dtype.value == "fp32" and "nothing travels" in plan().wire_dtype.reason
    shared = plan(parallel={"ranks_per_node": 2})
    assert shared.wire_dtype.value == "fp32" and "share a machine" in shared.wire_dtype.reason
    apart = plan(fleet(nodes=2))
    assert apart.wire_dtype.value == "auto" and "half the bytes" in apart.wire_dtype.reason
    asked = plan(parallel={"ranks_per_node": 2, "wire_dtype": "bf16"})
    assert asked.wire_dtype.value == "bf16" and asked.wire_dtype.reason == "set by you"


def test_a_slow_link_is_worth_the_memory_of_kept_weights() -> None:
    def kept(machines: Fleet, **section: Any) -> bool:
        train = {"tokens_per_step": 2048, "micro_batch_rows": 1}
        return plan(machines, parallel={"engine": "shard"}, train=train, fleet=section).keep_gathered.value

    quick, slow = fleet(nodes=4), replace(fleet(nodes=4), link_bits_per_second=50e6)
    assert not kept(quick) and kept(slow)
    # What the run file declares goes before what was found.
    assert kept(quick, link_gbit_per_second=0.05) and not kept(slow, link_gbit_per_second=10.0)


def test_keeping_gathered_weights_can_be_fixed() -> None:
    for fixed in (True, False):
        parallel = {"ranks_per_node": 2, "engine": "shard", "keep_gathered": fixed}
        made = plan(fleet(nodes=2), parallel=parallel)
        assert made.keep_gathered.value is fixed and made.keep_gathered.reason == "set by you"
        on_one_host = plan(parallel=parallel).keep_gathered
        assert not on_one_host.value and "one copy of the weights" in on_one_host.reason


def test_what_does_not_fit_comes_with_remedies_that_do() -> None:
    settings = config(train={"steps": 50}, fleet={"nodes": 2, "instance": "c7i.8xlarge"})
    made = make_plan(settings, fleet_of("2xc7i.8xlarge"), LLAMA)
    assert not made.fits
    assert made.shortfall_bytes == made.memory.peak.total - made.memory.limit > 0
    changes = {remedy.settings[0].split("=")[0] for remedy in made.remedies}
    assert {"fleet.nodes", "fleet.instance"} <= changes
    eight_bit, *others = made.remedies  # what holds less beside the same weights comes first, then the cheapest
    assert eight_bit.settings == ("train.optimizer=adamw-8bit",)
    assert [remedy.usd for remedy in others] == sorted(remedy.usd or 0 for remedy in others)
    assert all(remedy.tokens_per_second > 0 for remedy in made.remedies)


def test_more_machines_of_a_type_have_its_network() -> None:
    settings = config(train={"steps": 50}, fleet={"nodes": 1, "instance": "c7i.8xlarge"})
    made = make_plan(settings, fleet_of("1xc7i.8xlarge"), LLAMA)
    more = next(remedy for remedy in made.remedies if remedy.settings[0].startswith("fleet.nodes="))
    nodes = more.settings[0].partition("=")[2]
    named = config(train={"steps": 50}, fleet={"nodes": int(nodes), "instance": "c7i.8xlarge"})
    assert more.tokens_per_second == make_plan(named, fleet_of(f"{nodes}xc7i.8xlarge"), LLAMA).tokens_per_second


def test_remedies_undo_what_the_user_fixed() -> None:
    fixed = {"activation_checkpointing": False}
    needed = plan(train={**fixed, "micro_batch_rows": 1}).memory.peak.total
    made = plan(with_memory(fleet(), needed + 200 * 2**20), train={**fixed, "micro_batch_rows": 32})
    assert not made.fits
    assert "train.micro_batch_rows=auto" in {remedy.settings[0] for remedy in made.remedies}


def test_the_seeds_fleet_holds_llama_3_8b() -> None:
    quickest = make_plan(config(train={"steps": 50}), fleet_of("4xc7i.8xlarge"), LLAMA)
    assert quickest.fits and not quickest.activation_checkpointing.value
    smaller = config(train={"steps": 50, "activation_checkpointing": True})
    made = make_plan(smaller, fleet_of("4xc7i.8xlarge"), LLAMA)
    assert made.fits and made.engine.value == "shard" and made.dtype.value == "bf16" and made.world_size == 4
    peak = made.memory.peak
    assert peak.total < quickest.memory.peak.total and made.step_seconds.total > quickest.step_seconds.total
    assert peak.parameters + peak.optimizer == 12 * LLAMA.parameters // 4
    assert peak.gradients >= 4 * LLAMA.parameters // 4
    # Kept weights would take ten gigabytes more and save 2 % of a step.
    assert peak.total < 42e9 and not made.keep_gathered.value
    assert made.usd_per_hour == pytest.approx(4 * 1.428)
    assert any("rates of the CPU" in note for note in made.assumptions)


def test_fleets_are_ranked_by_cost_and_by_time() -> None:
    names = ("2xc7i.8xlarge", "4xc7i.8xlarge", "8xc7i.8xlarge", "4xm7i.8xlarge")
    ranked = compare_fleets(config(train={"steps": 10}), [fleet_of(name) for name in names], LLAMA)
    assert {made.fleet for made in ranked.by_cost} == {made.fleet for made in ranked.by_time}
    fitting = [made for made in ranked.by_cost if made.fits]
    prices = [usd_per_million_tokens(made) or 0.0 for made in fitting]
    assert prices == sorted(prices)
    assert not ranked.by_cost[-1].fits and not ranked.by_time[-1].fits


def test_the_limit_is_the_smaller_of_cgroup_and_ram() -> None:
    assert plan(with_memory(fleet(), 4 * GIB)).memory.limit < 4 * GIB
    assert plan(with_memory(fleet(), 64 * GIB)).memory.limit < 16 * GIB


def test_pieces_of_a_table_are_counted_where_they_stay_mapped() -> None:
    # 0.1.0 counted two million numbers of any table, and forgot what other ranks had filled once the head had left.
    small = read_card(config={**LLAMA_50M, "hidden_size": 256, "intermediate_size": 704, "vocab_size": 4096})
    ranks = {"engine": "shard", "ranks_per_node": 2}
    chosen = candidates_of(config(parallel=ranks), fleet(), small)[0].arrangement
    layer, table = small.largest_layer_parameters, 4096 * 256
    assert layer < table < 2**21
    cost = cost_of(chosen)
    pool = cost.between_steps(small, chosen).shared
    assert pool == 2 * 4 * (layer + table)  # two slots in turn
    points = {one.name: one for one in cost.step_points(small, chosen, linear_copies_weight=False)}
    read = 4 * small.parameters // 2  # weights of the other rank, all of them: few enough to stay
    others_filled, pieces = 2 * 4 * layer // 2, 2 * 4 * table // 2
    for name in ("loss", "backward of the last layer"):
        assert points[name].shared == pool + read + others_filled + pieces


@pytest.mark.parametrize(("epochs", "rows", "steps"), [(2.3, 100, 23), (4.1, 100, 41), (0.05, 100, 1), (1.99, 100, 19)])
def test_steps_of_a_part_of_an_epoch(epochs: float, rows: int, steps: int) -> None:
    assert steps_of_epochs(epochs, rows, 10) == steps
