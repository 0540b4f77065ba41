"""A task and an engine that coremill does not know, found by entry points, go the whole way as users type it.

tests/guests has both, as another package would bring them: nothing in src names them. In the second tier each run is
interrupted, by a SIGKILL that it gets over by itself and by a request to stop, and ends with the bits of one that was
left in peace; ranks are forked, started as programs, and started by torchrun.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from end_to_end.scene import SOURCE, Ended, Scene
from end_to_end.test_resume import WITHOUT_END, digest, events, losses
from end_to_end.test_supervise import going
from tiers import long_test
from tiny_models import make_model, make_tokenizer

GUESTS = Path(__file__).resolve().parents[1] / "guests"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
TOKENS, STEPS = 8, 8  # of a row; of a short run

ROWS_FILE = f"""\
task: row-regression
model: one-number
data:
  source: rows.jsonl
  sequence_length: {TOKENS}
  evaluation_fraction: 0.1
train:
  steps: {STEPS}
  tokens_per_step: {7 * TOKENS}  # two ranks share an odd number of rows
  learning_rate: 1.0e-2
  schedule: constant
parallel:
  engine: replicate
  dtype: fp32
  wire_dtype: fp32
  ranks_per_node: 2
  threads_per_rank: 1
checkpoint:
  every: 10steps
"""
# The engine's: the run file of the scene, with these.
ONE_SGD_PROCESS = ("parallel.engine=sgd-guest", "parallel.ranks_per_node=1", "checkpoint.every=10steps")


class GuestScene(Scene):
    """A scene in which the guests are installed."""

    def environ(self, marker: str, changes: Mapping[str, str]) -> dict[str, str]:
        return super().environ(marker, {"PYTHONPATH": f"{GUESTS}{os.pathsep}{SOURCE}", **changes})


@dataclass(frozen=True)
class Kind:
    """A run file with what makes a guest's run of it."""

    scene: Scene
    file: str
    ranks: int
    settings: tuple[str, ...] = ()

    def words(self, name: str, *settings: str, steps: int = STEPS) -> list[str]:
        """Of `train`, into the folder of this name."""
        words = [*self.settings, "train.schedule=constant", f"run.folder={name}", f"train.steps={steps}", *settings]
        return ["-m", "coremill", "train", self.file, *(word for setting in words for word in ("--set", setting))]

    def train(self, name: str, *settings: str, steps: int = STEPS, environ: Mapping[str, str] | None = None) -> Ended:
        return self.scene.run([sys.executable, *self.words(name, *settings, steps=steps)], environ)

    def interrupted_and_in_peace(self, name: str, python: list[str]) -> tuple[Path, Path]:
        """The folders of two runs of equally many steps; `python` starts the one that nobody disturbs."""
        war, peace = self.scene.path(f"{name}-war"), self.scene.path(f"{name}-peace")

        def steps_after(start: int) -> int:
            """Since this start of rank 0, counted from 0."""
            kinds = [event["kind"] for event in events(war)] if (war / "events/rank-00000.jsonl").exists() else []
            starts = [place for place, kind in enumerate(kinds) if kind == "start"]
            return kinds[starts[start] :].count("step") if len(starts) > start else 0

        with going(self.scene, [sys.executable, *self.words(war.name, steps=WITHOUT_END)]) as (running, wait_for):
            # The save of step 10 is whole: it goes on from there.
            wait_for(lambda: steps_after(0) >= 12 and any((war / "checkpoints").glob("step-*")))
            os.kill(events(war, self.ranks - 1)[0]["pid"], signal.SIGKILL)
            wait_for(lambda: steps_after(1) >= 3)
            running.process.terminate()
            stopped = running.end()
        assert stopped.code == 75 and not stopped.left, str(stopped)
        assert "was ended by SIGKILL: all ranks start again from step" in stopped.out
        # Where it stopped, which may lie before the step at which the first start was killed.
        steps = [event["step"] for event in events(war) if event["kind"] == "step"][-1] + 5
        done = self.train(war.name, "supervise.fork_ranks=false", steps=steps)
        assert done.code == 0 and not done.left, str(done)
        assert f"continuing from step {steps - 5}" in done.out
        done = self.scene.run([*python, *self.words(peace.name, steps=steps)])
        assert done.code == 0 and not done.left, str(done)
        return war, peace


@pytest.fixture(scope="module")
def scene(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """With a model that gives one number for a row, made of one that predicts words, and rows to learn it from."""
    config = {"id2label": {"0": "target"}, "label2id": {"target": 0}, "pad_token_id": 0}
    make_tokenizer(make_model(scene.path("one-number"), "llama", **config))
    rows = [[(31 * row + 17 * place) % 130 + 1 for place in range(TOKENS)] for row in range(120)]
    lines = [json.dumps({"tokens": tokens, "target": sum(tokens) / 500}) for tokens in rows]
    scene.path("rows.jsonl").write_text("\n".join(lines))
    scene.path("rows.yaml").write_text(ROWS_FILE)
    return GuestScene(scene.folder, scene.cache)


@pytest.fixture(scope="module")
def task(scene: Scene) -> Kind:
    return Kind(scene, "rows.yaml", ranks=2)


@pytest.fixture(scope="module")
def engine(scene: Scene) -> Kind:
    return Kind(scene, "run.yaml", ranks=1, settings=ONE_SGD_PROCESS)


@pytest.fixture(scope="module")
def trained(task: Kind) -> Path:
    """The folder of a run of the task by forked ranks."""
    done = task.train("task-trained", steps=30)
    assert done.code == 0 and not done.left, str(done)
    return task.scene.path("task-trained")


@pytest.fixture(scope="module")
def task_runs(task: Kind) -> tuple[Path, Path]:
    return task.interrupted_and_in_peace("task", [sys.executable])


@pytest.fixture(scope="module")
def engine_runs(engine: Kind) -> tuple[Path, Path]:
    return engine.interrupted_and_in_peace("engine", TORCHRUN)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with another package: what it registers cannot be imported, and has a name of ours too."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken_guest.py").write_text("import a_library_that_is_not_there\n")
    metadata = folder / "broken_guest-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken_guest\nVersion: 1.2\n")
    points = "replicate = broken_guest:Engine\nbroken = broken_guest:Engine"
    (metadata / "entry_points.txt").write_text(
        f"[coremill.engines]\n{points}\n[coremill.tasks]\nbroken-task = broken_guest:Task\n"
    )
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, GUESTS, SOURCE)))}


def planned(scene: Scene, *words: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    done = scene.coremill("plan", *words, "--json", environ=environ)
    assert done.code == 0, str(done)
    return dict(json.loads(done.out))


def report_of(scene: Scene, folder: Path) -> dict[str, Any]:
    done = scene.coremill("report", folder.name, "--json")
    assert done.code == 0, str(done)
    return dict(json.loads(done.out))


def state_names(folder: Path) -> set[str]:
    """The groups of tensors in the newest checkpoint."""
    from safetensors import safe_open

    found = set()
    for file in max((folder / "checkpoints").glob("step-*")).glob("rank-*.safetensors"):
        with safe_open(file, "numpy") as stored:
            found |= {name.partition("/")[0] for name in stored.keys()}  # noqa: SIM118
    return found


def close(found: Mapping[int, float], expected: Mapping[int, float]) -> bool:
    return len(found) == STEPS and all(math.isclose(found[step], expected[step], abs_tol=1e-6) for step in found)


def test_the_schema_and_messages_name_the_guests(scene: Scene) -> None:
    schema = scene.coremill("config", "schema").out
    assert '"row-regression"' in schema and '"sgd-guest"' in schema
    for key, wrong, right in (
        ("task", "row-regresion", "row-regression"),
        ("parallel.engine", "sgdguest", "sgd-guest"),
    ):
        refused = scene.coremill("plan", "run.yaml", "--set", f"{key}={wrong}")
        assert refused.code == 78 and f"did you mean {right}" in refused.err, str(refused)


def test_plans_count_the_guests(scene: Scene) -> None:
    plan = planned(scene, "rows.yaml")
    assert (plan["rows_per_step"], plan["sequence_length"], plan["logits"]["value"]) == (7, TOKENS, "none")
    words = [word for setting in ONE_SGD_PROCESS for word in ("--set", setting)]
    plan = planned(scene, "run.yaml", *words)
    assert plan["engine"] == {"value": "sgd-guest", "reason": "set by you"}
    adamw = planned(scene, "run.yaml", *words, "--set", "parallel.engine=replicate")
    held, twice = (each["memory_by_phase"]["steady_step"]["optimizer"] for each in (plan, adamw))
    assert 2 * held == twice > 0
    refused = scene.coremill("plan", "run.yaml", *words, "--set", "parallel.ranks_per_node=2")
    assert refused.code == 78 and "sgd-guest is one process" in refused.err, str(refused)


@long_test("test_resume.py interrupts what is ours in the same ways")
@pytest.mark.timeout(900)
def test_the_task_gets_over_every_interruption(task_runs: tuple[Path, Path]) -> None:
    war, peace = task_runs
    assert losses(war) == losses(peace)
    assert digest(war) == digest(peace)


@long_test("two ranks run the task below")
@pytest.mark.timeout(600)
def test_the_task_on_one_rank_under_torchrun_and_with_the_other_engine(
    task: Kind, task_runs: tuple[Path, Path], broken: dict[str, str]
) -> None:
    expected = losses(task_runs[1])
    done = task.scene.run([*TORCHRUN, *task.words("task-torchrun", "parallel.ranks_per_node=1")])
    assert done.code == 0 and not done.left, str(done)
    assert close(losses(task.scene.path("task-torchrun")), expected)
    # What somebody else broke is no concern of a run that does not name it.
    done = task.train("task-shard", "parallel.engine=shard", environ=broken)
    assert done.code == 0 and not done.left, str(done)
    assert "AutoModelForSequenceClassification.from_pretrained" in done.out
    assert close(losses(task.scene.path("task-shard")), expected)


def test_the_task_is_reported_and_exported(scene: Scene, trained: Path) -> None:
    assert losses(trained)[30] < losses(trained)[1] / 3, "it learns"
    report = report_of(scene, trained)
    assert report["state"] == "finished"
    assert "one number a row needs no help" in [choice["reason"].partition(": ")[2] for choice in report["choices"]]
    (evaluation,) = report["evaluations"]
    assert evaluation["rmse"] == pytest.approx(math.sqrt(evaluation["loss"]))

    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(trained / "export")
    held_out = [json.loads(line) for line in scene.path("rows.jsonl").read_text().splitlines()[-12:]]
    with torch.no_grad():
        found = model(input_ids=torch.tensor([row["tokens"] for row in held_out])).logits[:, 0]
    error = (found - torch.tensor([row["target"] for row in held_out])).square().mean()
    assert float(error) == pytest.approx(evaluation["loss"], rel=1e-4)


@long_test("engines of ours get over the same in test_resume.py")
@pytest.mark.timeout(900)
def test_the_engine_gets_over_every_interruption(engine_runs: tuple[Path, Path]) -> None:
    war, peace = engine_runs
    assert losses(war) == losses(peace)
    assert digest(war) == digest(peace)
    assert losses(peace)[max(losses(peace))] < losses(peace)[1], "it learns"
    assert state_names(war) == state_names(peace) == {"parameters", "velocity", "rng"}


@long_test("engines of ours get over the same in test_resume.py")
def test_the_engine_is_reported_and_exported(scene: Scene, engine_runs: tuple[Path, Path]) -> None:
    war, peace = engine_runs
    report = report_of(scene, war)
    assert (report["state"], len(report["faults"])) == ("finished", 1)
    assert {"name": "engine", "value": "sgd-guest", "reason": "set by you", "by": "plan"} in report["choices"]

    import torch
    from transformers import AutoModelForCausalLM

    before, after = (AutoModelForCausalLM.from_pretrained(each) for each in (scene.path("model"), peace / "export"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)


@long_test("engines of ours get over the same in test_resume.py")
@pytest.mark.timeout(600)
def test_what_the_engine_keeps_is_of_no_use_to_another(engine: Kind, engine_runs: tuple[Path, Path]) -> None:
    _, peace = engine_runs
    adamw = replace(engine, settings=("parallel.engine=replicate", *engine.settings[1:]))
    refused = adamw.train(peace.name, steps=max(losses(peace)) + 2)
    assert refused.code == 78, str(refused)
    assert "the checkpoint holds velocity of the weights, not exp_avg and exp_avg_sq" in refused.err


def test_a_guest_that_cannot_be_imported_is_one_message_for_who_names_it(scene: Scene, broken: dict[str, str]) -> None:
    for setting in ("parallel.engine=broken", "task=broken-task"):
        refused = scene.coremill("plan", "run.yaml", "--set", setting, environ=broken)
        assert refused.code == 78 and "Traceback" not in refused.err, str(refused)
        assert f"{setting.partition('=')[2]} is registered, but cannot be imported\n" in refused.err
        assert "of broken_guest 1.2" in refused.err and "a_library_that_is_not_there" in refused.err


def test_a_guest_with_a_name_of_ours_replaces_nothing(scene: Scene, broken: dict[str, str]) -> None:
    words = ("run.yaml", "--set", "parallel.ranks_per_node=1", "--set")
    plan = planned(scene, *words, "parallel.engine=auto")
    assert plan["engine"]["value"] == "replicate"
    for engine in ("auto", "replicate"):
        found = planned(scene, *words, f"parallel.engine={engine}", environ=broken)
        assert {**found, "engine": plan["engine"]} == plan
