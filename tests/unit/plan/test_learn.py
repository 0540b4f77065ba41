"""What finished runs teach: factors, the file they are kept in, and plans that go by them and say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.hardware.calibrate import MOST_OBSERVATIONS, cached_calibration, calibration_of, remember
from coremill.hardware.calibrate_part import Part
from coremill.hardware.facts import Fleet, Observation
from coremill.hardware.probe import probe_node
from coremill.plan.card import read_card
from coremill.plan.learn import Factors, factors_of, observe
from coremill.plan.planner import make_plan
from coremill.plan.types import Plan
from coremill.run import plan_command
from coremill.run.machines import find_fleet
from unit.plan.shapes import LLAMA_50M, calibration, fleet, machine
from unit.report.fake_run import make_fake_run

CARD = read_card(config=LLAMA_50M, name="small")


def observation(run: str = "a", **changes: object) -> Observation:
    values = {
        "engine": "replicate",
        "dtype": "fp32",
        "compute": 1.2,
        "optimizer": 1.5,
        "communication": None,
        "slack": 0.5,
        "matmul_flops_per_second": 70e9,
        "copy_bytes_per_second": 20e9,
    }
    return Observation(run=run, **{**values, **changes})  # type: ignore[arg-type]


def plan_with(*learned: Observation) -> Plan:
    machines = fleet(rates=replace(calibration(), learned=learned))
    return make_plan(RunConfig.model_validate({"train": {"micro_batch_rows": 2}}), machines, CARD)


def test_a_plan_without_learning_is_as_before() -> None:
    assert factors_of(calibration(), engine="replicate", dtype="fp32") == Factors()
    assert not any("learned" in note for note in plan_with().assumptions)


def test_a_plan_goes_by_what_was_learned_and_says_so() -> None:
    plain, learned = plan_with(), plan_with(observation())
    assert learned.step_seconds.compute == pytest.approx(1.2 * plain.step_seconds.compute)
    assert learned.step_seconds.optimizer == pytest.approx(1.5 * plain.step_seconds.optimizer)
    assert learned.memory.steady_step.slack == pytest.approx(0.5 * plain.memory.steady_step.slack, rel=1e-6)
    assert learned.memory.steady_step.activations == plain.memory.steady_step.activations
    assert any("1 run learned from" in note and "compute x 1.20" in note for note in learned.assumptions)


def test_the_median_of_several_runs_counts_and_other_dtypes_do_not() -> None:
    runs = [observation(str(factor), compute=factor) for factor in (0.9, 1.1, 5.0)]
    rates = replace(calibration(), learned=(*runs, observation("bf16", dtype="bf16", compute=9.0)))
    assert factors_of(rates, engine="replicate", dtype="fp32").compute == pytest.approx(1.1)
    # The update depends on the optimizer.
    lean = replace(rates, learned=(*runs, observation("lean", moved_by="adamw-8bit", optimizer=4.0)))
    assert factors_of(lean, engine="replicate", dtype="fp32").optimizer == pytest.approx(1.5)
    assert factors_of(lean, engine="replicate", dtype="fp32", optimizer="adamw-8bit").optimizer == pytest.approx(4.0)
    assert factors_of(rates, engine="replicate", dtype="fp32", optimizer="adamw-8bit").optimizer == 1.0
    # Memory and exchange depend on the engine, arithmetic does not.
    other = factors_of(rates, engine="shard", dtype="fp32")
    assert other.compute == pytest.approx(1.1) and other.slack == 1.0


def test_a_new_calibration_does_not_shift_what_was_learned() -> None:
    """Twice the calibrated rate: the machine still trains as fast as it did."""
    slow = replace(calibration(fp32=70e9), learned=(observation(),))
    quick = replace(calibration(fp32=140e9), learned=(observation(),))
    factor = factors_of(quick, engine="replicate", dtype="fp32").compute
    assert factor == pytest.approx(2 * factors_of(slow, engine="replicate", dtype="fp32").compute)


def test_a_run_that_went_as_planned_changes_nothing() -> None:
    plain = plan_with()
    seen = observe(
        run="r",
        engine="replicate",
        dtype="fp32",
        fleet=fleet(),
        planned_seconds=plain.step_seconds,
        planned_memory=plain.memory.steady_step,
        measured_seconds=plain.step_seconds,
        measured_bytes=plain.memory.steady_step.total,
    )
    assert (seen.compute, seen.optimizer, seen.slack, seen.communication) == (1.0, 1.0, 1.0, None)


def _rates(part: Part) -> dict[str, Any]:
    return {
        "fp32_matmul_flops_per_second": 70e9,
        "bf16_matmul_flops_per_second": 0.0,
        "bf16_emulated_flops_per_second": 1e8,
        "copy_bytes_per_second": 20e9,
        "base_rss_bytes": 4e8,
        "busy_fraction": 0.0,
        "splits": [],
    }


def test_it_is_kept_beside_the_calibration_and_outlives_it(tmp_path: Path) -> None:
    node = machine()
    calibration_of(node, tmp_path, runner=_rates)
    for number in range(MOST_OBSERVATIONS + 3):
        file = remember(node, tmp_path, observation(str(number)))
    remember(node, tmp_path, observation("22", compute=3.0))  # learned again: replaced
    kept = cached_calibration(node, tmp_path)
    assert kept is not None and len(kept.learned) == MOST_OBSERVATIONS and kept.learned[-1].compute == 3.0
    again = calibration_of(node, tmp_path, runner=_rates, refresh=True)
    assert again.learned == kept.learned
    assert cached_calibration(machine(cores=4), tmp_path) is None
    file.write_text("{not json")
    assert calibration_of(node, tmp_path).learned == ()


def _learn(run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREMILL_CACHE", str(cache))
    plan_command.learn_from(run, as_json=False, console=Console(width=200))


def test_coremill_plan_learns_from_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_fake_run(tmp_path / "run", world_size=1, steps=6, total_steps=6)
    cache = tmp_path / "cache"
    node = probe_node(busy_seconds=0)
    calibration_of(node, cache, runner=_rates)
    _learn(run, cache, monkeypatch)
    assert "compute x" in capsys.readouterr().out
    learned = cached_calibration(node, cache)
    assert learned is not None and learned.learned[0].run == str(run)
    found = find_fleet(RunConfig(), None)
    assert isinstance(found, Fleet) and found.calibration.learned == learned.learned


@pytest.mark.parametrize("kind", ["no run", "still running", "another fleet", "as transformers wrote it"])
def test_what_cannot_be_learned_from_is_said(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if kind == "still running":
        make_fake_run(run, world_size=1, steps=2, total_steps=6, ending="running")
    if kind == "another fleet":
        make_fake_run(run, world_size=4, steps=6, total_steps=6)
        assert "c7i" in json.loads((run / "plan.json").read_text())["fleet"]
    if kind == "as transformers wrote it":
        make_fake_run(run, world_size=1, steps=6, total_steps=6)
        file = run / "config.yaml"
        file.write_text(file.read_text().replace("model: built-in", "model: {name: built-in, fused: false}"))
    words = "tells nothing about others" if kind == "as transformers wrote it" else ""
    with pytest.raises(InputError, match=words):
        _learn(run, tmp_path / "cache", monkeypatch)
