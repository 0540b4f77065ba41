"""Choose what to keep: the best step, an early end, a step to go on from, any step as a folder, and on the hub.

One run for most of it: rank 0 is killed once between the evaluation of step 10 and the commit of its checkpoint.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from coremill.checkpoint.manifest import open_checkpoint
from end_to_end.scene import DEADLINE_SECONDS, Ended, Scene
from end_to_end.stand_in_upload_hub import TOKEN, serve_upload_hub
from tiers import long_test

# Found on PYTHONPATH by every Python: the first who commits step 10 is killed right before the rename.
FAULT = """
import importlib.abc, importlib.machinery, os, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "coremill.checkpoint.store":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            put, mark = module.Store.put, os.environ.get("KILLED_ONCE", "")
            def killed_once(self, partial, step, *rest):
                if step == 10 and mark and not os.path.exists(mark):
                    open(mark, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                return put(self, partial, step, *rest)
            module.Store.put = killed_once
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""
# A rate at which the loss soon goes up and down: no better evaluation comes, and some comes after a worse one.
RESTLESS = ("train.learning_rate=0.3", "train.schedule=constant", "evaluation.every_steps=5", "checkpoint.every=7steps")
KEEPING = (*RESTLESS, "evaluation.keep_best=true", "evaluation.stop_after=2", "train.steps=2000")


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def report_of(scene: Scene, folder: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(scene.coremill("report", folder, "--json").out)
    return document


def steps_kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def losses(folder: Path, rank: int = 0) -> dict[int, float]:
    lines = (folder / "events" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    return {event["step"]: event["loss"] for event in map(json.loads, lines) if event["kind"] == "step"}


@pytest.fixture(scope="module")
def kept(scene: Scene) -> Ended:
    """The run in `kept`, ended by its evaluations."""
    (scene.folder / "fault").mkdir()
    (scene.path("fault") / "sitecustomize.py").write_text(FAULT)
    path = f"{scene.path('fault')}:{scene.environ('', {})['PYTHONPATH']}"
    environ = {"PYTHONPATH": path, "KILLED_ONCE": str(scene.path("killed"))}
    command = [sys.executable, "-m", "coremill", "train", "run.yaml", "--nproc", "2"]
    done = scene.run([*command, *words("run.folder=kept", *KEEPING)], environ)
    assert done.code == 0 and not done.left, str(done)
    assert scene.path("killed").exists()
    return done


def test_the_best_is_kept_and_exported_and_the_run_ends_early(scene: Scene, kept: Ended) -> None:
    folder, report = scene.path("kept"), report_of(scene, "kept")
    scored = {each["step"]: each["perplexity"] for each in report["evaluations"]}
    best = min(scored, key=lambda step: (scored[step], step))
    last = max(scored)
    assert (report["state"], report["exit_code"], report["steps"]) == ("finished", 0, last)
    assert report["best"]["step"] == best and report["best"]["metrics"]["perplexity"] == scored[best]
    assert report["metrics"]["perplexity"] == scored[last]
    assert last == best + 10 < 2000  # two evaluations later
    assert report["early_stop"]["step"] == last and "evaluation.stop_after: 2" in report["early_stop"]["text"]
    assert len(report["faults"]) >= 1  # the kill between an evaluation and its commit; nothing of it was lost
    assert sorted(scored) == list(range(5, last + 1, 5))

    assert best in steps_kept(folder) and last in steps_kept(folder) and len(steps_kept(folder)) == 3
    newest = open_checkpoint(folder / "checkpoints" / f"step-{last:08d}").state()["evaluations"]
    assert {each["step"]: each["metrics"]["perplexity"] for each in newest["scores"]} == scored
    assert report["export"]["step"] == best and report["export"]["reason"].startswith("the best (perplexity")
    assert f"exported step {best}, the best (perplexity" in kept.out
    assert f"ends after step {last}: of the last 2 evaluations none was better than step {best}" in kept.out
    weights = load_file(folder / "export" / "model.safetensors")
    parts = sorted((folder / "checkpoints" / f"step-{best:08d}").glob("rank-*"))
    saved = [load_file(part)["parameters/model.norm.weight"] for part in parts]
    assert b"".join(part.tobytes() for part in saved) == weights["model.norm.weight"].tobytes()
    assert (folder / "export" / "README.md").read_text().startswith("---\n")


def test_an_early_end_is_an_end(scene: Scene, kept: Ended) -> None:
    again = scene.coremill("train", "run.yaml", *words("run.folder=kept", *KEEPING))
    assert again.code == 0, str(again)
    assert "holds this run, finished: of the last 2 evaluations" in again.out and "raise that to go on" in again.out


@long_test("another number of ranks goes on below")
def test_the_same_folder_by_one_process(scene: Scene, kept: Ended) -> None:
    done = scene.coremill("export", "kept", "by-hand/model")
    assert done.code == 0, str(done)
    made, exported = scene.path("by-hand/model"), scene.path("kept/export")
    assert sorted(each.name for each in made.iterdir()) == sorted(each.name for each in exported.iterdir())
    for file in exported.iterdir():
        if file.name != "README.md":
            assert file.read_bytes() == (made / file.name).read_bytes(), file.name
    assert [each.name for each in made.parent.iterdir()] == ["model"]  # nothing half-written is left
    refused = scene.coremill("export", "kept", "by-hand/model")
    assert refused.code == 78 and "is not empty" in refused.err


@long_test("unit tests set checkpoints aside, tests/distributed goes on with other ranks")
def test_going_on_from_the_best_with_other_ranks(scene: Scene, kept: Ended) -> None:
    folder, before = scene.path("kept"), report_of(scene, "kept")
    best, later = before["best"]["step"], [step for step in steps_kept(folder) if step > before["best"]["step"]]
    old = losses(folder, 1)
    settings = words("run.folder=kept", *KEEPING, f"train.steps={best + 3}", "parallel.engine=shard")
    refused = scene.coremill("train", "run.yaml", *settings, "--from", "3")
    assert refused.code == 78 and "step 3 was not kept" in refused.err
    assert f"kept are: {', '.join(str(step) for step in steps_kept(folder))}" in refused.err
    assert not list((folder / "checkpoints").glob("set-aside-*"))

    done = scene.coremill("train", "run.yaml", "--nproc", "1", "--from", "best", *settings)
    assert done.code == 0 and not done.left, str(done)
    aside = next((folder / "checkpoints").glob("set-aside-*"))
    assert f"set aside: steps {later[0]}, {later[1]}, now in {aside}" in done.out
    assert sorted(path.name for path in aside.iterdir()) == [f"step-{step:08d}" for step in later]
    assert not (folder / "checkpoints" / ".go-on-from").exists()
    report = report_of(scene, "kept")
    assert (report["state"], report["steps"]) == ("finished", best + 3)
    assert {each["step"] for each in report["evaluations"]} == {*range(5, best + 1, 5), best + 3}
    new = losses(folder)
    for step in range(best + 1, best + 4):
        assert new[step] == pytest.approx(old[step], rel=1e-4)
    assert report["early_stop"] is None


@pytest.fixture(scope="module")
def stopped(scene: Scene, kept: Ended) -> Iterator[Ended]:
    """A run that lets a checkpoint go every step, exported while it does, then asked to stop."""
    settings = words("run.folder=stopped", "train.steps=50000", "checkpoint.every=1steps", "checkpoint.keep=1")
    running = scene.start([sys.executable, "-m", "coremill", "train", "run.yaml", "--nproc", "2", *settings])
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(list(scene.path("stopped").glob("checkpoints/step-*"))) == 0:
            assert running.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        meanwhile = scene.coremill("export", "stopped", "meanwhile", "--dtype", "bf16")
        running.process.send_signal(signal.SIGTERM)
        done = running.end()
    finally:
        if running.process.poll() is None:
            running.kill()
    assert meanwhile.code == 0, str(meanwhile)
    assert done.code == 75 and not done.left, str(done)
    yield done


def test_a_run_is_exported_while_it_goes_on(scene: Scene, stopped: Ended) -> None:
    config = json.loads((scene.path("meanwhile") / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert (scene.path("meanwhile") / "tokenizer.json").is_file()


def test_a_stopped_run_goes_to_the_hub(scene: Scene, stopped: Ended) -> None:
    said = re.search(r"stopped on request after step (\d+)", stopped.out)
    assert said is not None
    with serve_upload_hub() as hub:
        hub.private["me/open"] = False
        hub.files["model-00001-of-00002.safetensors"] = b"of an earlier push"
        known = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
        refused = scene.coremill("export", "stopped", "pushed", "--push", "me/model", environ=known)
        assert refused.code == 78 and "not logged in" in refused.err and not hub.asked
        known["HF_TOKEN"] = TOKEN
        refused = scene.coremill("export", "stopped", "pushed", "--push", "me/open", "--private", environ=known)
        assert refused.code == 78 and "is there already, and public" in refused.err
        refused = scene.coremill("export", "stopped", "pushed", "--push", "you/model", environ=known)
        assert refused.code == 78 and "may not write to you/model" in refused.err
        assert not scene.path("pushed").exists() and list(hub.private) == ["me/open"], "nothing was made, here or there"

        done = scene.coremill("export", "stopped", "pushed", "--push", "me/model", "--private", environ=known)
        assert done.code == 0, str(done)
        assert f"pushed to {hub.address}/me/model (private)" in done.out
        assert TOKEN not in done.out + done.err
        made = {file.name: file.read_bytes() for file in scene.path("pushed").iterdir()}
        assert hub.files == made  # what an earlier push had more is gone
        assert hub.private["me/model"] and hub.messages == [f"step {said.group(1)} of a run of coremill"]
        assert f"| steps | {int(said.group(1)):,} of 50,000" in made["README.md"].decode()
        assert set(hub.cards) == {made["README.md"].decode()}
    weights = load_file(scene.path("pushed") / "model.safetensors")
    parts = sorted(next((scene.path("stopped") / "checkpoints").glob("step-*")).glob("rank-*"))
    saved = b"".join(load_file(part)["parameters/model.embed_tokens.weight"].tobytes() for part in parts)
    assert saved == weights["model.embed_tokens.weight"].tobytes()


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        (["evaluation.keep_best=true"], "only the last step is evaluated"),
        (["evaluation.stop_after=3"], "only the last step is evaluated"),
        (["evaluation.keep_best=bleu", "evaluation.every_steps=2"], "bleu is no metric of causal-lm"),
    ],
)
def test_what_cannot_be_compared_is_refused(scene: Scene, settings: list[str], answer: str) -> None:
    done = scene.coremill("train", "run.yaml", *words("run.folder=refused", *settings))
    assert done.code == 78 and answer in done.err, str(done)
    assert not scene.path("refused").exists()


def test_anew_and_from_are_two_things(scene: Scene) -> None:
    done = scene.coremill("train", "run.yaml", "--fresh", "--from", "best")
    assert done.code == 78 and "--fresh and --from are both given" in done.err
