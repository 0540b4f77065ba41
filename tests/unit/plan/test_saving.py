"""What a checkpoint takes, and whether a stop gives it that time: said beforehand."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from coremill.checkpoint.in_flight import save_deadline_of
from coremill.config.schema import RunConfig
from coremill.hardware.instances import fleet_of
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan
from coremill.plan.saving import SHARE_OF_GRACE, plan_save
from coremill.plan.stored import plan_from_json
from coremill.report.plan_screen import render_plan, render_plan_short
from coremill.run.attempts import grace_of, limits_of
from unit.plan.shapes import LLAMA_3_8B

EIGHT_BILLION = 8_030_261_248
LARGE_BYTES, SMALL_BYTES = 12 * EIGHT_BILLION, 12 * 50_000_000  # of a checkpoint


def config_of(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_left_to_itself_a_stop_gives_a_large_save_its_time() -> None:
    large, small = plan_save(config_of(), LARGE_BYTES, 30.0), plan_save(config_of(), SMALL_BYTES, 0.8)
    assert large.bytes == LARGE_BYTES and large.seconds == pytest.approx(771, abs=1)
    assert large.grace_seconds.value * SHARE_OF_GRACE >= 30.0 + 2 * large.seconds
    assert "96.4 GB takes 13 min at an assumed 125 MB/s" in large.grace_seconds.reason
    assert small.grace_seconds.value == 121.0
    assert large.warnings == small.warnings == ()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"checkpoint": {"grace": "2m"}}, "checkpoint.grace is 2m, but a save of 96.4 GB takes 13 min"),
        ({"supervise": {"save_deadline": "10m"}}, "supervise.save_deadline is 10m, but a save of 96.4 GB takes 13 min"),
        ({"checkpoint": {"spot_notices": "on"}}, "EC2 takes a spot machine back 120 s after it says so"),
    ],
)
def test_what_is_too_short_for_the_planned_save_is_said_before_the_first_step(sections: Any, words: str) -> None:
    config = config_of(**sections, fleet={"nodes": 4, "instance": "c7i.8xlarge"})
    assert plan_save(config, SMALL_BYTES, 1.0).warnings == ()
    plan = make_plan(config, fleet_of("4xc7i.8xlarge"), read_card(config=LLAMA_3_8B, name="llama3-8b"))
    for render in (render_plan_short, lambda *given: render_plan(given[0], {"parameters": EIGHT_BILLION}, given[1])):
        console = Console(file=io.StringIO(), width=80)
        render(plan.to_json(), console)
        assert f"saving: {words}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_stop_waits_for_the_step_under_way() -> None:
    """A step of 4 minutes and a save of 5 seconds: the two minutes alone would kill ranks within the step."""
    assert plan_save(config_of(), SMALL_BYTES, 240.0).grace_seconds.value == 120.0 + 300.0
    for sections, setting in (
        ({"grace": "4m"}, "checkpoint.grace is 4m"),
        ({"spot_notices": "on"}, "EC2 takes a spot machine back 120 s after it says so"),
    ):
        (warning,) = plan_save(config_of(checkpoint=sections), SMALL_BYTES, 240.0).warnings
        assert setting in warning and "takes 5 s at an assumed 125 MB/s, after a step of up to 4 min" in warning


def test_what_the_user_sets_stays() -> None:
    config = config_of(checkpoint={"grace": "30s"}, supervise={"save_deadline": "1m"})
    plan = make_plan(config, fleet_of("1xc7i.48xlarge"), read_card(config=LLAMA_3_8B, name="llama3-8b"))
    assert grace_of(config, plan) == 30.0
    assert (save_deadline_of(config).seconds, save_deadline_of(config).setting) == (60.0, "supervise.save_deadline")
    stop = save_deadline_of(config, is_stop=True)
    assert (stop.seconds, stop.setting) == (24.0, "checkpoint.grace")
    limits = limits_of(config, nodes=1, planned_step_seconds=1.0)
    assert limits.save_deadline_seconds == 120.0 and not limits.save_may_get_on


def test_a_plan_of_an_earlier_version_is_read() -> None:
    config = config_of()
    plan = make_plan(config, fleet_of("1xc7i.48xlarge"), read_card(config=LLAMA_3_8B, name="llama3-8b"))
    document = json.loads(json.dumps(plan.to_json()))
    assert plan_from_json(document).save == plan.save
    del document["save"]
    earlier = plan_from_json(document)
    assert earlier.save is None and grace_of(config, earlier) == 120.0
