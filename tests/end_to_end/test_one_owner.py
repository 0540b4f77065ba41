"""One run, one owner: a second start beside a living run is refused, and a killed one holds nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

from end_to_end.scene import Scene
from end_to_end.test_bad_input import TORCHRUN
from end_to_end.test_stop import events, wait_for

TRAIN = [sys.executable, "-m", "coremill", "train", "run.yaml", "--nproc", "1", "--set", "checkpoint.every=1steps"]


def steps_of(folder: Path) -> list[object]:
    return [event["step"] for event in events(folder) if event["kind"] == "step"]


def test_a_second_start_is_refused_until_the_first_is_gone(scene: Scene) -> None:
    folder = scene.path("owned")
    here = ["--set", "run.folder=owned"]
    running = scene.start([*TRAIN, *here, "--set", "train.steps=50000"])
    try:
        wait_for(lambda: any(path.name > "step-00000004" for path in folder.glob("checkpoints/step-*")), running)
        elsewhere = ["--set", "run.folder=elsewhere", "--set", f"checkpoint.folder={folder / 'checkpoints'}"]
        for words, names in (
            (here, "is the folder of a run that is going on"),
            ([*here, "--fresh"], "is the folder of a run that is going on"),
            (elsewhere, f"is in use by the run in {folder}"),
        ):
            done = scene.run([*TRAIN, *words])
            assert done.code == 78, str(done)
            assert f"process {running.process.pid}, since 20" in done.err and names in done.err, str(done)
            assert not done.left and "Traceback" not in done.err
        if os.environ.get("COREMILL_LONG_TESTS"):  # a unit test of run/rank.py does it otherwise
            done = scene.run([*TORCHRUN, "train", "run.yaml", *here, "--fresh"])
            assert done.code != 0 and f"process {running.process.pid}, since 20" in done.err, str(done)
            assert re.search(r"exitcode +: 78", done.err) and not done.left
        assert not scene.path("elsewhere").exists()
        assert running.process.poll() is None
        done = scene.coremill("report", folder, "--json")
        assert json.loads(done.out)["state"] == "running" and json.loads(done.out)["exit_code"] is None
    finally:
        running.process.send_signal(signal.SIGKILL)
        done = running.end()
    assert not done.left, str(done)
    before = steps_of(folder)
    assert before == list(range(1, len(before) + 1)), "nobody else wrote into its events"
    done = scene.run([*TRAIN, *here, "--set", "train.steps=3"])  # the same command; it would go on, but for this
    assert done.code == 78 and "steps are done already" in done.err, str(done)
    assert not list(folder.rglob("run.lock"))
