"""What takes longer than every limit, as a model of 96 GB does, ends well as long as it gets on. There is no large one
here: a sitecustomize.py shortens the limits to seconds and slows every piece that is read, hashed or written.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from end_to_end.scene import DEADLINE_SECONDS, Ended, Scene

LIMIT_SECONDS = 5.0  # of every kind
SLOW_SECONDS = 8.0  # of each thing that is slowed
RANKS = 2
# What is done to a module once it is imported. SLOW names what is slowed: its pieces take 0.4 s each until that is long
# enough. STOP names where which rank stops itself, once each, which a file remembers.
INJECTED = f"""
import importlib.abc, importlib.machinery, os, pathlib, signal, sys, time, types
LIMIT, SLOW_SECONDS = {LIMIT_SECONDS}, {SLOW_SECONDS}
SLOW = {{what: SLOW_SECONDS for what in os.environ.get("SLOW", "").split()}}  # what is left of it, by process
STOP = dict(word.split(":") for word in os.environ.get("STOP", "").split())

def piece(what):
    mark = pathlib.Path(os.environ["STOPS"]) / what
    if what in STOP and os.environ.get("RANK") == STOP[what] and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    if SLOW.get(what, 0.0) > 0.0:
        SLOW[what] -= 0.4
        time.sleep(0.4)

def stuck(module):
    module.UNTIMED_PHASE_SECONDS = LIMIT

def world(module):
    module.join_world.__wrapped__.__kwdefaults__["timeout_seconds"] = LIMIT

def in_flight(module):
    module.STANDING_SECONDS = LIMIT

def saving(module):
    module.STANDING_SECONDS = LIMIT

def read(module):
    reading = os.preadv
    def preadv(descriptor, *rest):
        of_checkpoint = "rank-0" in os.readlink(f"/proc/self/fd/{{descriptor}}")
        piece("resume" if of_checkpoint else "load")
        return reading(descriptor, *rest)
    module.os = types.SimpleNamespace(**{{**vars(os), "preadv": preadv}})

def manifest(module):
    real = module.hashlib.sha256
    class Slow:
        def __init__(self, *given):
            self.digest = real(*given)
        def update(self, data):
            piece("hash")
            self.digest.update(data)
        def hexdigest(self):
            return self.digest.hexdigest()
    module.READ_BYTES = 4096
    module.hashlib = types.SimpleNamespace(sha256=Slow)

def store(module):
    file = module.SteadyFile
    write = file.write
    def slow(self, data):
        if self._path.suffix == ".safetensors":
            piece("save" if "rank-0" in self._path.name else "export")
        write(self, data)
    file.write = slow
    module.PIECE_BYTES = 4096

def work(module):
    module.WORTH_SAYING_SECONDS, module.LINE_EVERY_SECONDS = 1.0, 2.0

AFTER = {{
    "coremill.supervise.stuck": stuck, "coremill.world.group": world, "coremill.checkpoint.in_flight": in_flight,
    "coremill.plan.saving": saving, "coremill.model.read": read, "coremill.checkpoint.manifest": manifest,
    "coremill.checkpoint.store": store, "coremill.report.work": work,
}}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in AFTER:
            return None
        after, spec = AFTER.pop(name), importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), after(module))[0]
        return spec

sys.meta_path.insert(0, Finder())
"""


def train(scene: Scene, steps: int, *settings: str, slow: str = "", stop: str = "") -> Ended:
    injected = scene.path("injected")
    injected.mkdir(exist_ok=True)
    (injected / "sitecustomize.py").write_text(INJECTED)
    words = [
        "run.folder=run",
        f"train.steps={steps}",
        "train.schedule=constant",
        "parallel.engine=shard",
        "checkpoint.every=1000steps",  # and after the last step
        f"supervise.stuck_after={LIMIT_SECONDS:g}s",
        "data.evaluation_fraction=0",
        *settings,
    ]
    command = [sys.executable, "-m", "coremill", "train", "run.yaml", "--nproc", str(RANKS)]
    environ = {
        "PYTHONPATH": f"{injected}{os.pathsep}{scene.environ('', {})['PYTHONPATH']}",
        "SLOW": slow,
        "STOP": stop,
        "STOPS": str(injected),
    }
    running = scene.start([*command, *(word for setting in words for word in ("--set", setting))], environ)
    return running.end(2 * DEADLINE_SECONDS)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    files = sorted((folder / "events").glob("rank-*.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="a minute, and decided in unit tests: COREMILL_LONG_TESTS=1 runs it",
)
@pytest.mark.timeout(900)
def test_what_gets_on_is_never_stuck_however_long_it_takes(scene: Scene) -> None:
    folder = scene.path("run")
    # Load and export: the other rank waits for longer than its timeout. The export is rank 0's alone.
    done = train(scene, 4, slow="load save export")
    assert done.code == 0 and not done.left, str(done)
    assert events(folder, "fault") == [] and "start again" not in done.out
    assert max(event["seconds"] for event in events(folder, "load")) > LIMIT_SECONDS
    assert [event["saved"] for event in events(folder, "save")] == [True] * RANKS
    assert min(event["seconds"] for event in events(folder, "save")) > LIMIT_SECONDS
    assert events(folder, "export")[0]["seconds"] > LIMIT_SECONDS
    # The bars, which off a terminal are lines.
    for what in ("reading weights", "saving", "exporting"):
        assert f"{what}: " in done.out and "ETA" in done.out

    done = train(scene, 6, "run.export=false", slow="hash resume")
    assert done.code == 0 and not done.left, str(done)
    assert events(folder, "fault") == []
    assert [event["step"] for event in events(folder, "resume")] == [4] * RANKS
    assert "checking the checkpoint: " in done.out and "reading the checkpoint: " in done.out


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="a minute of restarts, and unit tests stop ranks in every phase: COREMILL_LONG_TESTS=1 runs it",
)
@pytest.mark.timeout(900)
def test_a_rank_that_is_stopped_in_such_work_is_found(scene: Scene) -> None:
    stop = {"load": 1, "save": 1, "export": 0, "hash": 1, "resume": 1}
    words = " ".join(f"{what}:{rank}" for what, rank in stop.items())
    done = train(scene, 8, "run.folder=stopped", "supervise.restarts_without_progress=9", stop=words)
    assert done.code == 0 and not done.left, str(done)
    faults = sorted(events(scene.path("stopped"), "fault"), key=lambda event: event["time"])
    assert [fault["rank"] for fault in faults] == list(stop.values())
    # The save runs beside the last step.
    for fault, where in zip(faults, ("load", "step 8|phase save", "export", "load", "load"), strict=True):
        said = rf"rank {fault['rank']} is stopped \(no sign of life for \d+ s in (phase )?({where})\)"
        assert re.fullmatch(said, fault["text"]) and fault["action"] == "restart"
