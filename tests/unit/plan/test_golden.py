"""Whole plans, kept as files: a change of any number or word shows up in review.

After a change that is meant: `PYTHONPATH=tests python tests/unit/plan/test_golden.py` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coremill.config.schema import RunConfig
from coremill.hardware.facts import Fleet
from coremill.hardware.instances import fleet_of
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan
from unit.plan.shapes import LLAMA_3_8B, LLAMA_50M, fleet

FOLDER = Path(__file__).parents[2] / "golden" / "plans"

CASES: dict[str, tuple[dict[str, Any], Fleet, dict[str, Any]]] = {
    "llama3-8b-4xc7i.8xlarge": (LLAMA_3_8B, fleet_of("4xc7i.8xlarge"), {"nodes": 4, "instance": "c7i.8xlarge"}),
    "llama3-8b-2xc7i.8xlarge-too-small": (
        LLAMA_3_8B,
        fleet_of("2xc7i.8xlarge"),
        {"nodes": 2, "instance": "c7i.8xlarge"},
    ),
    "llama3-8b-1xc7i.48xlarge": (LLAMA_3_8B, fleet_of("1xc7i.48xlarge"), {"instance": "c7i.48xlarge"}),
    "llama-50m-two-cores": (LLAMA_50M, fleet(), {}),
}


def plan_json(name: str) -> dict[str, Any]:
    model, machines, section = CASES[name]
    config = RunConfig.model_validate({"train": {"steps": 50}, "fleet": section})
    made = make_plan(config, machines, read_card(config=model, name=name.rsplit("-", 1)[0]))
    document: dict[str, Any] = json.loads(json.dumps(made.to_json()))
    return _rounded(document)


def _rounded(value: Any) -> Any:
    """Seven digits: enough to see any change, few enough not to see another CPU's last bit."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_plan_is_the_golden_one(name: str) -> None:
    assert plan_json(name) == json.loads((FOLDER / f"{name}.json").read_text())


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.json").write_text(_text(plan_json(case)))
