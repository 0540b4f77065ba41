"""Sources mixed by shares, killed in the middle, go on with the bits of a run that was left in peace."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from end_to_end.scene import RUN_FILE, Scene
from end_to_end.test_resume import digest, in_folder, interrupted, losses

SOURCES = """\
  sources:
    - {source: text, share: 0.6}
    - {source: "*.csv", column: body, share: 0.4}
"""


@pytest.fixture
def mixed(scene: Scene) -> Scene:
    scene.path("run.yaml").write_text(RUN_FILE.replace("  source: text/*.jsonl\n", SOURCES))
    rows = "".join(f'{index},"wheel, core {index} mill\nstep loss"\n' for index in range(20))
    scene.path("notes.csv").write_text(f"id,body\n{rows}")
    return scene


def sources_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "report.json").read_text())["sources"]
    return found


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="unit tests hold orders and shares, test_chaos.py kills: COREMILL_LONG_TESTS=1 runs it",
)
def test_the_same_bits_after_a_kill_and_the_shares_that_were_asked(mixed: Scene) -> None:
    folder, peace = mixed.path("war"), mixed.path("peace")
    done = interrupted(mixed, folder, lambda _, ranks: os.kill(ranks[1], signal.SIGKILL), after_steps=14)
    assert done.code == 137 and not done.left, str(done)
    assert "source *.csv: 40.0 % of the rows; " in done.out
    steps = max(losses(folder)) + 5
    done = mixed.run(in_folder("war", steps))
    assert done.code == 0 and "continuing from step 10" in done.out, str(done)
    assert mixed.run(in_folder("peace", steps)).code == 0
    assert losses(folder) == losses(peace) and digest(folder) == digest(peace)

    # The rows go on where they were at another number of ranks too; what cannot change is refused.
    refused = mixed.run([*in_folder("peace", steps + 5), "--set", "data.sources=[text, notes.csv]"])
    assert refused.code == 78 and "data.sources" in refused.err
    done = mixed.run([*in_folder("peace", steps + 5), "--nproc", "1"])
    assert done.code == 0, str(done)
    for run, count in ((folder, steps), (peace, steps + 5)):
        text, notes = sources_of(run)
        assert text["rows_seen"] + notes["rows_seen"] == 8 * count  # of a step
        assert abs(text["share_got"] - 0.6) < 0.01 and abs(notes["share_got"] - 0.4) < 0.01
        assert notes["passes"] == notes["rows_seen"] / notes["rows"] > text["passes"]
    screen = mixed.coremill("report", "peace").out
    (row,) = [line.split() for line in screen.splitlines() if line.startswith("*.csv ")]  # in the table of sources
    assert row[:3] == ["*.csv", "40.0", "%"] and row[3].startswith("40.")
