"""Whole runs through the command line: 1 and 2 ranks, every way to start them, what they leave, and starting again."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from end_to_end.scene import SOURCE, Ended, Scene
from tiers import long_test, some_long

PYTHON = sys.executable
SHARD = ("--set", "parallel.engine=shard")
NUMBERS = (
    *("tokens_per_second", "padding_fraction", "model_flops_per_second", "matmul_flops_per_second", "utilization"),
    *("load_seconds", "loss_first", "loss_last", "steps", "seconds", "goodput"),
)
LISTS = (
    *("bytes_read_per_rank", "peak_rss_bytes_per_rank", "peak_rss_bytes_at_load_per_rank"),
    "wire_bytes_per_step_per_rank",
)


@dataclass(frozen=True)
class Finished:
    """A run that went well."""

    folder: Path
    screen: str
    report: dict[str, Any]

    @property
    def export(self) -> Path:
        return self.folder / "export"


def finished(scene: Scene, folder: str, done: Ended) -> Finished:
    assert done.code == 0, str(done)
    assert not done.left
    path = scene.path(folder)
    return Finished(path, done.out, json.loads((path / "report.json").read_text()))


@pytest.fixture(scope="module")
def one(scene: Scene) -> Finished:
    """One rank, started as the installed script does it."""
    return finished(scene, "run", scene.coremill("train", "run.yaml"))


@pytest.fixture(scope="module")
def two(scene: Scene) -> Finished:
    """Two ranks that share the model."""
    words = ("train", "run.yaml", "--nproc", "2", *SHARD, "--set", "run.folder=two")
    return finished(scene, "two", scene.coremill(*words))


@pytest.fixture(scope="module", params=["one", "two"])
def either(request: pytest.FixtureRequest) -> Finished:
    run: Finished = request.getfixturevalue(request.param)
    return run


def test_the_screen_is_plain_lines(either: Finished) -> None:
    lines = either.screen.splitlines()
    assert "\x1b" not in either.screen and "\r" not in either.screen
    said = ("ranks: ", "engine: ", "dtype: ", "memory: ", "speed: ", "training data: ", "run: 8 steps, ", "trained on ")
    for start in (*said, "step 1/8  loss ", "step 8/8  loss "):
        assert sum(line.startswith(start) for line in lines) == 1, either.screen
    (last,) = [line for line in lines if line.startswith("step 8/8 ")]
    assert re.search(r"  lr [\d.e-]+  grad norm [\d.e-]+  epoch \d\.\d\d  ", last), last
    assert f"trained on 2,048 tokens: {either.report['epochs']:.2f} epochs of " in either.screen
    assert any(line.startswith("evaluation at step 8: loss ") for line in lines)
    assert any(line.startswith("held out for evaluation: 6 of 60 documents, ") for line in lines)
    assert f"exported to {either.export}" in either.screen
    assert any(line.startswith("finished  8 steps in ") for line in lines)


def test_the_ranks_say_nothing_of_their_own(either: Finished) -> None:
    for log in (either.folder / "logs").iterdir():
        assert log.read_text() == "", log.read_text()


def test_the_report_has_every_number(either: Finished) -> None:
    report, ranks = either.report, either.report["world_size"]
    assert report["state"] == "finished" and report["error"] is None
    assert all(math.isfinite(report[name]) for name in NUMBERS)
    assert (report["steps"], report["tokens"], report["padding_fraction"]) == (8, 8 * 256, 0)
    assert 0 < report["goodput"] <= 1
    data = report["data"]
    assert (data["documents"], data["evaluation_documents"]) == (60, 6) and 0 < data["evaluation_rows"] < 40
    assert report["utilization"] == pytest.approx(
        report["model_flops_per_second"] / report["matmul_flops_per_second"], rel=1e-9
    )
    assert all(len(report[name]) == ranks for name in LISTS)
    weights = (either.export / "model.safetensors").stat().st_size
    assert all(weights / ranks * 0.7 < read <= weights * 1.02 / ranks + 8192 for read in report["bytes_read_per_rank"])
    assert all(100e6 < peak < 4e9 for peak in report["peak_rss_bytes_per_rank"])
    at_load = zip(report["peak_rss_bytes_at_load_per_rank"], report["peak_rss_bytes_per_rank"], strict=True)
    assert all(load <= peak for load, peak in at_load)
    assert all((wire > 0) == (ranks > 1) for wire in report["wire_bytes_per_step_per_rank"])
    for name in ("memory_bytes_per_rank", "step_seconds"):
        assert report["plan"][name] and report["measured"][name]


def test_the_loss_falls_and_ranks_agree(one: Finished, two: Finished) -> None:
    assert one.report["loss_last"] < one.report["loss_first"] - 1
    assert one.report["loss_first"] == pytest.approx(two.report["loss_first"], rel=1e-5)
    assert one.report["loss_last"] == pytest.approx(two.report["loss_last"], rel=1e-5)


def test_events_are_valid_lines_of_every_kind(either: Finished) -> None:
    files = sorted((either.folder / "events").iterdir())
    assert [file.name for file in files] == [f"rank-{rank:05d}.jsonl" for rank in range(either.report["world_size"])]
    for rank, file in enumerate(files):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        assert all(event["rank"] == rank and event["time"] > 1e9 for event in events)
        kinds = [event["kind"] for event in events]
        assert kinds[0] == "start" and kinds[-1] == "end"
        assert {"phase", "load", "choice", "step", "evaluation"} <= set(kinds)
        assert [event["step"] for event in events if event["kind"] == "step"] == list(range(1, 9))


def test_the_page_opens_offline(either: Finished) -> None:
    class Page(HTMLParser):
        addresses: list[str] = []
        tags: set[str] = set()

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.tags.add(tag)
            self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]

    page = Page()
    text = (either.folder / "report.html").read_text()
    page.feed(text)
    assert "svg" in page.tags
    assert not [address for address in page.addresses if not address.startswith(("#", "data:"))]
    assert "url(http" not in text and "@import" not in text


def test_the_export_is_the_trained_model(either: Finished) -> None:
    """Bit by bit what the last checkpoint holds, and it computes the loss the run found."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from coremill.data.packed_batches import evaluation_batches
    from coremill.run.prepare import Orders

    model = AutoModelForCausalLM.from_pretrained(either.export).eval()
    parts = [load_file(file) for file in sorted(either.folder.glob("checkpoints/step-00000008/*.safetensors"))]
    prefix = next(name for name in parts[0] if name.endswith("model.norm.weight") and "exp_avg" not in name)
    prefix = prefix.removesuffix("model.norm.weight")
    trained = {
        name.removeprefix(prefix): torch.cat([part[name] for part in parts if name in part])
        for name in parts[0]
        if name.startswith(prefix) and "exp_avg" not in name
    }
    original = AutoModelForCausalLM.from_config(model.config).eval()
    original.load_state_dict(trained)
    held_out = evaluation_batches(
        Orders.read(either.folder / "orders.json").data, rank=0, world_size=1, micro_batch_rows=8, max_rows=64
    )
    total = 0.0
    with torch.no_grad():
        for batch in held_out:
            logits = model(batch.input_ids).logits
            assert torch.equal(logits, original(batch.input_ids).logits)
            total += torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
            ).item()
    assert total / held_out.valid_targets == pytest.approx(either.report["evaluations"][-1]["loss"], rel=1e-6)
    assert AutoTokenizer.from_pretrained(either.export).decode(batch.input_ids[0])


def test_report_shows_a_run(scene: Scene, one: Finished) -> None:
    shown = scene.coremill("report", "run")
    assert shown.code == 0 and shown.out.startswith("finished  8 steps in ") and not shown.err
    as_json = scene.coremill("report", "run", "--json")
    assert json.loads(as_json.out)["loss_last"] == one.report["loss_last"] and not as_json.err


# -- the same run by other launchers


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def mpirun(name: str, *options: str) -> list[str]:
    if os.geteuid() == 0 and shutil.which("sshd") and not os.environ.get("COREMILL_LONG_TESTS"):
        pytest.skip("tests/hosts does it on two hosts: COREMILL_LONG_TESTS=1 runs it on one as well")
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return [path, *options, "-n", "2", PYTHON, "-m", "coremill"]


def launched_by(name: str) -> tuple[list[str], dict[str, str]]:
    port = str(free_port())
    if name == "torchrun":
        torchrun = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        return [*torchrun, "-m", "coremill"], {}
    if name == "coremill launch":
        return [PYTHON, "-m", "coremill", "launch", "--nproc", "2", "-m", "coremill"], {}
    if name == "Open MPI":
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return mpirun("mpirun.openmpi", *as_root, "--oversubscribe"), {"MASTER_PORT": port}
    if name == "MPICH":
        return mpirun("mpirun.mpich"), {"MASTER_PORT": port}
    pod = {"NNODES": "1", "NPROC_PER_NODE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [PYTHON, "-m", "coremill"], {f"PET_{variable}": value for variable, value in pod.items()}


@pytest.mark.parametrize(
    "name",
    some_long(
        ["torchrun", "coremill launch", "Open MPI", "MPICH", "Kubeflow"],
        ["MPICH"],
        "tests/distributed/test_launch.py meets under all of them",
    ),
)
def test_every_launcher_gives_the_same_run(scene: Scene, two: Finished, name: str) -> None:
    command, environ = launched_by(name)
    folder = name.replace(" ", "-").lower()
    done = scene.run([*command, "train", "run.yaml", *SHARD, "--set", f"run.folder={folder}"], environ)
    run = finished(scene, folder, done)
    assert run.report["world_size"] == 2
    assert run.report["loss_last"] == pytest.approx(two.report["loss_last"], rel=1e-6)
    assert run.report["evaluations"][-1]["loss"] == pytest.approx(two.report["evaluations"][-1]["loss"], rel=1e-6)
    assert run.screen.count("finished  8 steps in ") == 1, run.screen
    assert run.screen.count("step 8/8 ") == 1, run.screen
    assert (run.folder / "report.html").is_file() and (run.export / "config.json").is_file()


# -- starting again


def test_a_finished_run_says_so(scene: Scene, one: Finished) -> None:
    again = scene.coremill("train", "run.yaml")
    assert again.code == 0 and not again.err
    assert f"{one.folder} holds this run, finished" in again.out and len(again.out.splitlines()) == 1
    assert json.loads((one.folder / "report.json").read_text()) == one.report


def test_a_changed_config_is_refused_by_name(scene: Scene, one: Finished) -> None:
    """Only what a continuation cannot change is named, with the old value and the way out."""
    free, fixed = "train.learning_rate=0.5", ("data.column=words", "train.adam_beta1=0.5")
    words = [word for setting in (free, *fixed) for word in ("--set", setting)]
    changed = scene.coremill("train", "run.yaml", *words)
    assert changed.code == 78
    assert "--set data.column=text --set train.adam_beta1=0.9" in changed.err and "--fresh" in changed.err, changed.err
    assert "learning_rate" not in changed.err.split("where: ")[1].splitlines()[0], changed.err
    assert json.loads((one.folder / "report.json").read_text()) == one.report


def test_a_dry_run_starts_and_leaves_nothing(scene: Scene) -> None:
    dry = scene.coremill("train", "run.yaml", "--dry-run", "--nproc", "2", "--set", "run.folder=dry")
    assert dry.code == 0 and not dry.err and not dry.left
    assert dry.out.splitlines()[-1] == f"dry run: 2 ranks would run 8 steps in {scene.path('dry')}"
    assert not scene.path("dry").exists()


def test_a_run_of_epochs_is_planned_as_long_as_it_will_be(scene: Scene) -> None:
    """By plan, without tokenising again what a dry run has tokenised, and by both alike."""
    words = ("run.yaml", "--set", "train.steps=null", "--set", "train.epochs=2")
    dry = scene.coremill("train", *words, "--dry-run", "--set", "run.folder=dry")
    assert dry.code == 0, str(dry)
    steps = int(re.findall(r"would run (\d+) steps", dry.out)[0])
    plan = json.loads(scene.coremill("plan", *words, "--json", "--fleet", "c7i.large").out)
    assert plan["steps"] == steps and not plan["steps_estimated"] and plan["hours"] > 0 and plan["usd"] > 0
    away = json.loads(scene.coremill("plan", *words, "--json", "--set", "data.source=away.txt").out)
    assert away["steps"] is None and "no such file" in away["steps_words"]


def test_without_a_run_file_a_named_model_is_trained_by_the_defaults(scene: Scene) -> None:
    named = ["model=model", "data.source=text/*.jsonl", "data.sequence_length=32", "train.steps=6"]
    words = [word for setting in named for word in ("--set", setting)]
    done = scene.coremill("train", *words, "--set", "train.tokens_per_step=256", "--dry-run")
    assert done.code == 0, str(done)
    first = done.out.splitlines()[0]
    assert first.startswith("no run file: model and data.source by --set, every other key has its default"), str(done)
    assert str(scene.path("runs/model")) in done.out and not scene.path("runs").exists()
    shown = json.loads(scene.coremill("config", "show", *words, "--json").out)
    assert (shown["tokenizer"], shown["train"]["learning_rate"]) == (None, 2e-5)


def test_fresh_starts_anew_and_crowding_is_said(scene: Scene, two: Finished) -> None:
    """On one CPU by `taskset`, so that two ranks are more than there are cores, on any machine; and with ranks started
    afresh instead of forked, which changes no bit."""
    cpu = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", cpu, PYTHON, "-m", "coremill", "train", "run.yaml", "--nproc", "2", *SHARD]
    shutil.copytree(two.folder, scene.path("anew"))
    command += ["--fresh", "--set", "run.folder=anew", "--set", "supervise.fork_ranks=false"]
    done = scene.run(command, {"COREMILL_CACHE": one_core_cache(scene, cpu)})
    run = finished(scene, "anew", done)
    assert run.screen.count("2 ranks with 1 thread each share 1 CPU: they take turns") == 1
    assert run.report["environment"]["started"] > two.report["environment"]["started"]
    assert [ending.name for ending in (run.folder / "logs").glob("template-*")] == []
    for number in ("loss_first", "loss_last"):
        assert run.report[number] == two.report[number]


@long_test("unit tests have trackers that hang and break")
def test_trackers_that_hang_or_break_change_no_bit(scene: Scene, one: Finished) -> None:
    """TensorBoard beside a W&B that never answers and an MLflow that cannot be imported; all of it ends in time."""
    hung, broken = scene.path("libraries/wandb"), scene.path("libraries/mlflow")
    for folder, text in (
        (hung, "import time\ntime.sleep(1e6)\n"),
        (broken, "raise RuntimeError('a broken install')\n"),
    ):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
    words = ("train", "run.yaml", "--set", "run.folder=tracked", "--set", "run.trackers=[tensorboard, wandb, mlflow]")
    paths = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{hung.parent}"}
    run = finished(scene, "tracked", scene.coremill(*words, environ=paths))
    assert losses_of(run) == losses_of(one)
    logs, kept = run.folder / "logs", f"all numbers are in {run.folder / 'events'}"
    ended = f"mlflow has ended, see {logs / 'tracker-mlflow.log'}; the run goes on without it"
    for line in (ended, f"to look: tensorboard --logdir {run.folder / 'trackers' / 'tensorboard'}"):
        assert run.screen.count(line) == 1, run.screen
    for name in ("wandb was not done after 30 s and was ended", "mlflow did not end well"):
        assert f"{name}: 8 steps up to 8 did not get there; {kept}" in run.screen, run.screen
    assert "a broken install" in (logs / "tracker-mlflow.log").read_text()
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    found = accumulator(str(run.folder / "trackers" / "tensorboard")).Reload().Scalars("train/loss")
    assert [(one.step, one.value) for one in found] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(losses_of(one), 1)
    ]


def losses_of(run: Finished) -> list[float]:
    events = [json.loads(line) for line in (run.folder / "events" / "rank-00000.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "step"]


def one_core_cache(scene: Scene, cpu: str) -> str:
    """Rates are kept by the number of cores: one core is another machine."""
    make = (
        "import sys; from pathlib import Path; from end_to_end.scene import make_cache; make_cache(Path(sys.argv[1]))"
    )
    tests = Path(__file__).resolve().parents[1]
    paths = {"PYTHONPATH": f"{tests.parent / 'src'}{os.pathsep}{tests}"}
    made = scene.run(["taskset", "-c", cpu, PYTHON, "-c", make, str(scene.path("one-core"))], paths)
    assert made.code == 0, str(made)
    return str(scene.path("one-core"))
