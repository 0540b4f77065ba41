"""The short form of `make chaos`: every fault that fits into minutes, done for real, each with its row.

`make test` stops a rank, takes a machine back and makes a loss not finite; killed ranks, storage that fails and damaged
checkpoints are in test_resume.py and test_storage.py too, and come with COREMILL_LONG_TESTS=1 like all others. The
numbers of docs/chaos.md are those of `make chaos`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.catalogue import EXPERIMENTS
from chaos.experiment import Row
from chaos.table import read

from end_to_end.scene import left_behind

ROOT = Path(__file__).resolve().parents[2]
FIRST_TIER = ("X4", "X6b", "X21")
SHORT = [
    experiment
    for experiment in EXPERIMENTS
    if experiment.short_trials and (os.environ.get("COREMILL_LONG_TESTS") or experiment.name in FIRST_TIER)
]
pytestmark = pytest.mark.timeout(1800)  # minutes on a quiet machine; this is for one that others use


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    folder = tmp_path_factory.mktemp("chaos")
    only = ",".join(experiment.name for experiment in SHORT)
    command = [sys.executable, "-m", "chaos", "--short", "--only", only]
    command += ["--json", str(folder / "rows.json"), "--folder", str(folder)]
    marker = folder.name + folder.parent.name
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COREMILL_TEST_MARKER": marker}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1700)
    assert not left_behind(marker), "processes were left"
    assert (folder / "rows.json").exists(), done.stdout + done.stderr
    return {row.key: row for row in read(folder / "rows.json")}


@pytest.mark.parametrize("key", [experiment.key for experiment in SHORT])
def test_the_promise_is_kept(rows: dict[str, Row], key: str) -> None:
    row = rows[key]
    if row.not_run:
        pytest.skip(row.not_run)
    assert row.trials and row.passed == row.trials, row.failures
    assert row.same_bits in (None, True)


def test_exit_codes(rows: dict[str, Row]) -> None:
    promised = {"X6a": (75,), "X6b": (75,), "X6c": (75,), "X21": (70,)}
    codes = {key: rows[key].exit_codes for key in promised if key in rows}
    assert codes == {key: promised[key] for key in codes} and {"X6b", "X21"} <= codes.keys()


def test_no_step_is_lost_where_there_was_notice(rows: dict[str, Row]) -> None:
    assert {rows[key].steps_lost for key in ("X5", "X6a", "X6b", "X6c") if key in rows} == {(0,)}
