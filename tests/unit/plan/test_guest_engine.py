"""An engine of another package is planned by what it says of itself: found by its entry point, asked by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GUEST = '''
from coremill.plan.engine_cost import EngineCost, StateBytes
from coremill.plan.peak import StepPoint


class PlainCost(EngineCost):
    """One process, plain SGD: no state besides the weights, a gradient at a time."""

    tried_by_auto = TRIED_BY_AUTO

    def state(self, card, arrangement):
        return StateBytes(parameters=4 * card.parameters, gradients=4 * card.trainable_parameters, optimizer=0)

    def step_points(self, card, arrangement, *, linear_copies_weight):
        yield StepPoint(name="end of backward", gradients=self.state(card, arrangement).gradients)

    def saved_bytes(self, card, arrangement):
        return 4 * card.parameters

    def optimizer_seconds(self, card, arrangement, fleet):
        return 1e-12 * card.trainable_parameters


class Plain:
    name = "plain-sgd"
    cost = PlainCost()
'''


def planned(folder: Path, *settings: str, tried_by_auto: bool = False) -> dict[str, Any]:
    """`coremill plan` where the guest is installed."""
    (folder / "guest.py").write_text(GUEST.replace("TRIED_BY_AUTO", str(tried_by_auto)))
    metadata = folder / "guest-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[coremill.engines]\nplain-sgd = guest:Plain\n")
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "coremill", "plan", "--fleet", "1xc7i.4xlarge", "--json", *words]
    where = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=where, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_asked_for_by_name_only_it_is_priced(tmp_path: Path) -> None:
    made = planned(tmp_path, "parallel.engine=plain-sgd")
    assert made["engine"] == {"value": "plain-sgd", "reason": "set by you"}
    assert made["keep_gathered"]["reason"] == "plain-sgd: weights are always whole"
    memory, saved = made["memory_by_phase"]["steady_step"], made["save"]["bytes"]
    assert memory["optimizer"] == 0 and memory["gradients"] == memory["parameters"] == saved
    assert made["wire_bytes_per_step_per_rank"] == 0 and made["step_seconds"]["optimizer"] < 1e-3


@pytest.mark.parametrize(("tried_by_auto", "engine"), [(False, "replicate"), (True, "plain-sgd")])
def test_auto_looks_at_guests_that_ask_for_it(tmp_path: Path, tried_by_auto: bool, engine: str) -> None:
    made = planned(tmp_path, tried_by_auto=tried_by_auto)
    assert made["engine"] == {"value": engine, "reason": "one rank: nothing to share"}
