"""What ranks settle before they train, as far as it needs no ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.config.schema import RunConfig
from coremill.launch.run_folder import RunFolder
from coremill.muster import with_cpus_told
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan
from coremill.prepare import Orders
from unit.plan.shapes import LLAMA_50M, fleet


@pytest.mark.parametrize(
    ("engine", "other", "is_told"),
    [("replicate", "aarch64 NEON", True), ("shard", "aarch64 NEON", False), ("replicate", None, False)],
)
def test_cpus_that_may_round_differently_are_in_the_plan(tmp_path: Path, engine, other, is_told) -> None:
    world: Any = SimpleNamespace(nodes=2, rank=0, gather=lambda mine: [mine, other or mine])
    config = RunConfig.model_validate({"parallel": {"engine": engine}})
    plan = make_plan(config, fleet(), read_card(config=LLAMA_50M, name="small"))
    nothing: Any = None
    orders = Orders(model=nothing, tokenizer=nothing, data=nothing, steps=1, plan=plan, facts={})
    told = with_cpus_told(orders, RunFolder(tmp_path), world).plan.assumptions[len(plan.assumptions) :]
    if not is_told:
        assert told == () and not list(tmp_path.iterdir())
        return
    assert len(told) == 1 and "aarch64 NEON" in told[0]
    assert json.loads((tmp_path / "plan.json").read_text())["assumptions"][-1] == told[0]
