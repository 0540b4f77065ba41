"""Both optimizers and both ways of updating in the plan: what they hold, which of them auto takes, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.hardware.facts import Fleet
from coremill.hardware.instances import fleet_of
from coremill.plan import planner
from coremill.plan.card import read_card
from coremill.plan.engine_cost import cost_named
from coremill.plan.planner import make_plan
from coremill.plan.stored import plan_from_json
from coremill.plan.types import Choice, Plan
from unit.plan.shapes import GIB, LLAMA_3_8B, LLAMA_50M, fleet

LLAMA = read_card(config=LLAMA_3_8B, name="Llama-3-8B")
SMALL = read_card(config=LLAMA_50M, name="small")
ONE_MACHINE = fleet_of("1xc7i.8xlarge")
WAYS = [(optimizer, update) for optimizer in ("adamw", "adamw-8bit") for update in ("after", "inside")]


def plan(machines: Fleet = ONE_MACHINE, card: Any = LLAMA, *, with_remedies: bool = False, **sections: Any) -> Plan:
    sections["train"] = {"steps": 50, "tokens_per_step": 4096, **sections.get("train", {})}
    config = RunConfig.model_validate({"data": {"sequence_length": 512}, **sections})
    return make_plan(config, machines, card, with_remedies=with_remedies)


def with_gigabytes(memory: int) -> Fleet:
    """A machine of 16 cores with AMX and so much memory."""
    node = replace(ONE_MACHINE.node, memory_total_bytes=memory * GIB)
    return replace(ONE_MACHINE, node=node, memory_bytes_per_node=None)


def test_a_plan_as_it_always_was_says_nothing_of_either() -> None:
    made = plan(fleet(), SMALL)
    assert (made.optimizer.value, made.update.value) == ("adamw", "after")
    assert not {"optimizer", "update"} & set(made.to_json())
    assert plan_from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(("optimizer", "update"), WAYS)
@pytest.mark.parametrize("machines", ["1xr7i.48xlarge", "4xr7i.8xlarge"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_a_rank_holds(machines: str, dtype: str, optimizer: str, update: str) -> None:
    """Bytes of a parameter: weight, fp32 or as computed with, a copy beside a master, moments, an fp32 gradient."""
    parallel = {"engine": "replicate", "dtype": dtype, "ranks_per_node": 1}
    train = {"optimizer": optimizer, "update": update, "activation_checkpointing": True}
    step = plan(fleet_of(machines), train=train, parallel=parallel).memory.steady_step
    compute = 2 if dtype == "bf16" else 4
    masters = optimizer == "adamw"
    assert step.parameters == (4 + (2 if dtype == "bf16" else 0) if masters else compute) * LLAMA.parameters
    assert step.optimizer == pytest.approx((8 if masters else 2 + 2 * 4 / 256) * LLAMA.parameters, rel=0.02)
    all_gradients = 4 * LLAMA.parameters
    assert step.gradients < 0.15 * all_gradients if update == "inside" else step.gradients >= all_gradients


def test_a_share_of_it_where_ranks_share() -> None:
    for optimizer, update in WAYS:
        train = {"optimizer": optimizer, "update": update, "tokens_per_step": 16384, "activation_checkpointing": True}
        parallel = {"engine": "shard", "keep_gathered": False}
        step = plan(fleet_of("4xc7i.8xlarge"), train=train, parallel=parallel).memory.steady_step
        held = step.parameters + step.optimizer
        # Besides, a table of random bits, and four pieces in fp32 for each of 16 threads.
        work = 0 if optimizer == "adamw" else 2 * 2**21 * 16 + 16 * 4 * 4 * 2**17
        of_parameter = 12 if optimizer == "adamw" else 4 + 2 * 4 / 256
        assert held == pytest.approx(of_parameter * LLAMA.parameters / 4 + work, rel=1e-3)


def test_checkpoints_hold_what_memory_holds() -> None:
    saved = [plan(train={"optimizer": optimizer}).save for optimizer in ("adamw", "adamw-8bit")]
    assert [save.bytes / LLAMA.parameters for save in saved if save] == pytest.approx([12, 4 + 2 * 4 / 256])


@pytest.mark.parametrize(
    ("memory", "way"),
    [
        (384, ("adamw", "after")),
        (144, ("adamw", "inside")),
        (96, ("adamw-8bit", "after")),
        (48, ("adamw-8bit", "inside")),
    ],
)
def test_auto_takes_the_first_that_fits(memory: int, way: tuple[str, str]) -> None:
    made = plan(with_gigabytes(memory), train={"optimizer": "auto"})
    assert made.fits and (made.optimizer.value, made.update.value) == way
    assert made.optimizer.reason and made.update.reason
    if way[0] == "adamw-8bit":
        assert "adamw needs 122 GB per rank at least" in made.optimizer.reason and "to the bit" in made.optimizer.reason
    if way[1] == "inside":
        assert "train.clip_norm goes by the norms of earlier steps" in made.update.reason
        assert made.accumulation_steps.value == 1


def test_where_nothing_fits_auto_shows_the_smallest() -> None:
    made = plan(with_gigabytes(24), train={"optimizer": "auto"})
    assert not made.fits and (made.optimizer.value, made.update.value) == ("adamw-8bit", "inside")
    assert made.memory.peak.total < 41e9


def test_adamw_is_not_updated_inside_backward_unasked() -> None:
    made = plan(with_gigabytes(144))
    assert not made.fits and (made.optimizer.value, made.update.value) == ("adamw", "after")
    assert plan(with_gigabytes(144), train={"update": "inside"}).fits


def test_reasons_say_what_you_set() -> None:
    made = plan(train={"optimizer": "adamw-8bit", "update": "inside", "clip_norm": None})
    assert made.optimizer.reason.startswith("set by you: moments in 8 bits") and "bf16" in made.optimizer.reason
    assert made.update.reason.startswith("set by you: each gradient is freed") and "clip" not in made.update.reason
    small = plan(fleet(), SMALL, train={"optimizer": "adamw-8bit", "update": "after"})
    assert "stochastically" not in small.optimizer.reason and small.update.reason == "set by you"  # fp32 here


def test_inside_backward_rows_are_computed_at_once() -> None:
    train = {"update": "inside", "optimizer": "adamw-8bit", "tokens_per_step": 16384}
    made = plan(train=train)
    assert (made.micro_batch_rows.value, made.accumulation_steps.value) == (32, 1)  # 16384 tokens
    passes = plan(train={**train, "micro_batch_rows": 8})
    assert passes.accumulation_steps.value == 4 and "of the last of 4 passes" in passes.update.reason
    assert passes.memory.steady_step.gradients > 2 * LLAMA.parameters  # they wait for the last


def test_a_step_too_large_for_one_pass_is_cut() -> None:
    made = plan(train={"optimizer": "adamw-8bit", "tokens_per_step": 65536})
    assert made.fits and made.update.value == "inside" and made.accumulation_steps.value > 1
    huge = plan(with_gigabytes(24), train={"optimizer": "adamw-8bit", "tokens_per_step": 2**20, "update": "after"})
    assert not huge.fits and huge.update == Choice("after", "set by you")


@pytest.mark.parametrize(("machines", "settings"), [("1xc7i.8xlarge", {}), ("2xc7i.8xlarge", {"update": "after"})])
def test_eight_bits_are_the_first_remedy_and_evaluated(machines: str, settings: dict[str, str]) -> None:
    refused = plan(fleet_of(machines), with_remedies=True, train=settings)
    assert not refused.fits
    first = refused.remedies[0]
    assert first.settings == ("train.optimizer=adamw-8bit",)
    cured = plan(fleet_of(machines), train={**settings, "optimizer": "adamw-8bit"})
    assert cured.fits and cured.memory.peak.total == first.total_bytes_per_rank
    assert (cured.tokens_per_second, cured.usd()) == (first.tokens_per_second, first.usd)


def test_freeing_gradients_inside_backward_is_a_remedy() -> None:
    alone = plan(with_gigabytes(144), with_remedies=True).remedies
    assert [remedy.settings for remedy in alone[:2]] == [("train.optimizer=adamw-8bit",), ("train.update=inside",)]
    with_bits = plan(with_gigabytes(48), with_remedies=True, train={"update": "after"}).remedies[0]
    assert with_bits.settings == ("train.optimizer=adamw-8bit", "train.update=inside")
    left_open = plan(with_gigabytes(48), with_remedies=True).remedies[0]
    assert left_open.settings == ("train.optimizer=adamw-8bit",) and "freed inside backward" in left_open.change


def test_steps_that_may_be_left_out_need_all_gradients_first() -> None:
    numerics = {"on_non_finite": "skip"}
    made = plan(with_gigabytes(48), with_remedies=True, train={"optimizer": "adamw-8bit"}, numerics=numerics)
    assert not made.fits and made.update.value == "after" and "skip" in made.update.reason
    assert not any("inside" in setting for remedy in made.remedies for setting in remedy.settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {steps: 5, update: inside}\nnumerics: {on_non_finite: skip}", "such a step cannot be left out"),
        ("train: {steps: 5, optimizer: adamw-4bit}", "train.optimizer must be one of auto, adamw, adamw-8bit"),
        ("train: {steps: 5, update: before}", "train.update must be one of auto, after, inside"),
    ],
)
def test_what_cannot_be_is_refused_with_78(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(tmp_path / "run.yaml")
    assert caught.value.exit_code == 78 and words in str(caught.value)


def test_an_engine_that_does_not_update_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(cost_named("replicate")), "updates", ("after",))
    with pytest.raises(InputError) as caught:
        plan(train={"update": "inside"}, parallel={"engine": "replicate"})
    assert caught.value.where == "train.update" and caught.value.exit_code == 78
    refused = plan(with_remedies=True, parallel={"engine": "replicate"}, train={"update": "after"})
    assert not any("inside" in setting for remedy in refused.remedies for setting in remedy.settings)


def test_the_update_takes_longer_in_8_bits_and_little_of_a_step() -> None:
    lean, plain = (plan(train={"optimizer": optimizer}) for optimizer in ("adamw-8bit", "adamw"))
    assert plain.step_seconds.optimizer < lean.step_seconds.optimizer < 0.15 * lean.step_seconds.total


def test_the_page_is_what_the_plan_says() -> None:
    from scripts.what_fits import render_page

    page = Path(planner.__file__).parents[3] / "docs" / "what-fits.md"
    assert page.read_text(encoding="utf-8") == render_page(), "run: python scripts/what_fits.py > docs/what-fits.md"
