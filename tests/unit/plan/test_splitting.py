from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from coremill.config.schema import RunConfig
from coremill.engines.replicate import _require_room
from coremill.errors import InputError
from coremill.hardware.facts import SPLIT_WIDTHS, Fleet, SplitRates
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan
from coremill.plan.splitting import SplitFactors, split_factors
from coremill.plan.types import Plan
from unit.plan.shapes import calibration, fleet, machine, with_memory

CARD = read_card(config={"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 16000})
MORE_THAN_ENOUGH = 10_000


def alike(processes: int, seconds: float) -> SplitRates:
    """All parts of a step take so many times as long as one process does."""
    each = (seconds,) * len(SPLIT_WIDTHS)
    return SplitRates(processes=processes, products=each, between=each, attention=each, update=seconds)


def machine_with(*splits: SplitRates, cores: int = 4, **more: Any) -> Fleet:
    return fleet(node=machine(cores=cores), rates=replace(calibration(), splits=splits), **more)


def roomy(machines: Fleet) -> Fleet:
    large = 64 * 10**9
    return replace(machines, node=replace(machines.node, memory_total_bytes=large, memory_available_bytes=large))


def plan_of(machines: Fleet, steps: int = MORE_THAN_ENOUGH, rows: int = 16, **parallel: Any) -> Plan:
    train = {"steps": steps, "tokens_per_step": rows * 512, "micro_batch_rows": 1, "activation_checkpointing": False}
    data = {"sequence_length": 512}
    return make_plan(RunConfig.model_validate({"train": train, "data": data, "parallel": parallel}), machines, CARD)


def test_between_what_was_measured_it_lies_on_a_line() -> None:
    few, many = alike(1, 1.0), replace(alike(4, 0.8), products=(0.6, 0.8, 1.0))
    rates = replace(calibration(), splits=(few, many))
    assert split_factors(rates, ranks=1, width=512, dtype="fp32") == SplitFactors()
    assert split_factors(rates, ranks=4, width=SPLIT_WIDTHS[1], dtype="fp32").products == pytest.approx(0.8)
    assert split_factors(rates, ranks=2, width=SPLIT_WIDTHS[1], dtype="fp32").products == pytest.approx(0.9)
    assert split_factors(rates, ranks=4, width=8 * SPLIT_WIDTHS[-1], dtype="fp32").products == 1.0
    assert split_factors(rates, ranks=4, width=8, dtype="fp32").products == pytest.approx(0.6)
    assert split_factors(rates, ranks=64, width=512, dtype="fp32").between == pytest.approx(0.8)
    assert split_factors(replace(rates, splits=()), ranks=4, width=512, dtype="fp32") == SplitFactors()


def test_ranks_that_make_a_step_shorter_are_taken() -> None:
    plan = plan_of(machine_with(alike(1, 1.0), alike(2, 0.8), alike(4, 0.7)))
    assert plan.ranks_per_node.value == 4 and plan.threads_per_rank.value == 1
    assert "2 ranks would take 1" in plan.ranks_per_node.reason and "more time" in plan.ranks_per_node.reason
    assert len({cpu for cpus in plan.cpus_of_rank for cpu in cpus}) == 4
    # One copy of the weights for all.
    assert plan.engine.value == "replicate" and "one copy" in plan.engine.reason


def test_a_little_is_not_worth_a_rank() -> None:
    plan = plan_of(machine_with(alike(1, 1.0), alike(2, 1.0), alike(4, 1.0)))
    assert plan.ranks_per_node.value == 1 and "not worth" in plan.ranks_per_node.reason
    a_little = machine_with(alike(1, 1.0), alike(2, 0.98))
    assert plan_of(a_little).ranks_per_node.value == 2
    assumed = replace(a_little, calibration=replace(a_little.calibration, source="assumed"))
    assert plan_of(assumed).ranks_per_node.value == 1, "what was not measured has to bring more"


def test_ranks_that_make_it_longer_are_left() -> None:
    assert plan_of(machine_with(alike(1, 1.0), alike(2, 1.1), alike(4, 1.2))).ranks_per_node.value == 1


def test_a_short_run_has_no_use_for_them() -> None:
    machines = machine_with(alike(1, 1.0), alike(4, 0.7))
    assert plan_of(machines, steps=1).ranks_per_node.value == 4  # one of a minute and a half is worth it
    quick = replace(machines, calibration=replace(machines.calibration, fp32_matmul_flops_per_second=7e12))
    assert plan_of(quick, steps=1).ranks_per_node.value == 1
    assert plan_of(quick).ranks_per_node.value == 4


def test_where_memory_is_short_the_price_is_named() -> None:
    machines = machine_with(alike(1, 1.0), alike(4, 0.7))
    needed = plan_of(machines).memory.peak.total
    plan = plan_of(with_memory(machines, 3 * needed))
    assert plan.fits and plan.ranks_per_node.value < 4
    assert re.search(
        r"; 4 ranks would take 1\d % less time, but need 1\d\.\d GB of memory in all", plan.ranks_per_node.reason
    )


def test_a_number_that_is_set_stays() -> None:
    machines = machine_with(alike(1, 1.0), alike(2, 0.9), alike(4, 0.5))
    assert plan_of(machines, ranks_per_node=2).ranks_per_node.value == 2
    assert plan_of(machines, threads_per_rank=4).ranks_per_node.value == 1


def test_a_run_that_goes_on_keeps_its_number() -> None:
    machines = machine_with(alike(1, 1.0), alike(2, 0.9), alike(4, 0.5))
    config = RunConfig.model_validate(
        {"train": {"steps": 100, "tokens_per_step": 4096}, "data": {"sequence_length": 512}}
    )
    for before in (1, 2, 3, 4):
        plan = make_plan(config, machines, CARD, ranks_before=before)
        assert plan.ranks_per_node.value == before and "as the run began" in plan.ranks_per_node.reason
    assert make_plan(config, machines, CARD, ranks_before=8).ranks_per_node.value == 4  # it has become another machine
    fixed = config.model_copy(update={"parallel": config.parallel.model_copy(update={"ranks_per_node": 2})})
    assert make_plan(fixed, machines, CARD, ranks_before=4).ranks_per_node.value == 2


def test_nothing_measured_leaves_one_for_each_numa_node() -> None:
    assert plan_of(machine_with()).ranks_per_node.value == 1


def test_several_machines_have_one_for_each_numa_node() -> None:
    assert plan_of(machine_with(alike(1, 1.0), alike(4, 0.5), nodes=2)).ranks_per_node.value == 1


def test_ratios_of_a_dtype_that_was_not_measured_are_not_known() -> None:
    bf16 = replace(calibration(bf16=700e9), splits=(alike(1, 1.0), alike(4, 0.7)))
    assert split_factors(bf16, ranks=4, width=512, dtype="bf16").products == pytest.approx(0.7)
    assert split_factors(bf16, ranks=4, width=512, dtype="fp32") == SplitFactors()


def test_numbers_that_an_engine_refuses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from coremill.engines.replicate.cost import ReplicateCost

    def one_process_only(self: ReplicateCost, arrangement: Any) -> ReplicateCost:
        if arrangement.ranks_per_node > 1:
            raise InputError("one process")
        return self

    monkeypatch.setattr(ReplicateCost, "form", one_process_only)
    machines = machine_with(alike(1, 1.0), alike(4, 0.5))
    assert plan_of(machines, engine="replicate").ranks_per_node.value == 1


def test_a_rank_keeps_enough_tokens_and_the_rows_that_were_asked_for() -> None:
    machines = roomy(machine_with(alike(1, 1.0), alike(2, 0.8), alike(4, 0.7)))
    assert [plan_of(machines, rows=rows).ranks_per_node.value for rows in (4, 2, 1)] == [4, 2, 1]
    train = {"steps": 1000, "tokens_per_step": 8 * 64, "activation_checkpointing": False}
    config = RunConfig.model_validate({"train": train, "data": {"sequence_length": 64}})
    assert make_plan(config, machines, CARD).ranks_per_node.value == 1
    config = RunConfig.model_validate(
        {"train": {**train, "tokens_per_step": 16 * 512, "micro_batch_rows": 8}, "data": {"sequence_length": 512}}
    )
    plan = make_plan(config, machines, CARD)
    assert (plan.ranks_per_node.value, plan.micro_batch_rows.value) == (2, 8)


def test_a_run_goes_on_with_any_number_of_ranks_that_the_cores_allow() -> None:
    config = RunConfig.model_validate({"train": {"steps": 1000, "tokens_per_step": 12 * 512}})
    for rates in ((alike(1, 1.0), alike(2, 0.8), alike(4, 0.7)), ()):
        machines = machine_with(*rates, cores=12)
        for before in (3, 6, 12):
            plan = make_plan(config, machines, CARD, ranks_before=before)
            assert plan.ranks_per_node.value == before and "as the run began" in plan.ranks_per_node.reason
    assert make_plan(config, machine_with(cores=2), CARD, ranks_before=12).ranks_per_node.value == 1


def test_what_was_not_measured_in_a_dtype_is_not_used_for_it() -> None:
    rates = replace(
        calibration(),
        splits=(alike(1, 1.0), alike(4, 0.7)),
        bf16_matmul_flops_per_second=4 * calibration().fp32_matmul_flops_per_second,
    )
    machines = fleet(node=machine(cores=4, isa=("amx_bf16",)), rates=rates)
    assert plan_of(machines).ranks_per_node.value == 4
    assert plan_of(machines, dtype="fp32").ranks_per_node.value == 1


def test_whole_copies_are_priced_in_case_ranks_cannot_share_one() -> None:
    machines = roomy(machine_with(alike(1, 1.0), alike(4, 0.7)))
    plan, alone = plan_of(machines), plan_of(machines, ranks_per_node=1)
    assert alone.bytes_per_rank_over_the_wire is None
    assert plan.bytes_per_rank_over_the_wire is not None
    # Weights, gradients and moments of all parameters instead of a quarter.
    more = plan.bytes_per_rank_over_the_wire - plan.memory.peak.total
    assert more > 0.7 * 12 * CARD.parameters
    _require_room(plan, "no memory to share")
    short = replace(plan, memory=replace(plan.memory, limit=plan.bytes_per_rank_over_the_wire - 1))
    with pytest.raises(InputError, match="cannot share one copy of the model here: no memory to share"):
        _require_room(short, "no memory to share")
    _require_room(replace(short, fits=False), "it was forced")
