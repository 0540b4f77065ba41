"""Every example runs: the first line of a run file is the command that runs it, and here it is run.

What an example needs and the repository does not have (a model, text files, a hub) is put in its place: the fine-tuning
example trains the model that the example before it left.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from house import ROOT

from coremill.cli import app
from end_to_end.scene import Scene, make_cache, write_text

EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.yaml"))
TINY = "examples/tiny-from-scratch.yaml"
FINE_TUNING = "examples/finetune-files.yaml"
LLAMA = "examples/llama3-8b-wikitext.yaml"
CHAT, INSTRUCTIONS = "examples/chat.yaml", "examples/instructions.yaml"
# Two real runs: half a minute on a machine with nothing else to do, many times that on a shared one.
TIMEOUT_SECONDS = 800
pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS + 60)


def header(example: str) -> list[str]:
    """The command in the first line."""
    first = (ROOT / example).read_text().splitlines()[0]
    assert first.startswith("# coremill ")
    return shlex.split(first.removeprefix("# "))


def test_every_example_is_tried():
    assert set(EXAMPLES) == {TINY, FINE_TUNING, LLAMA, CHAT, INSTRUCTIONS}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A folder as a user has it: the examples, and nothing else yet."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "examples").symlink_to(ROOT / "examples")
    return Scene(folder, make_cache(tmp_path_factory.mktemp("cache")))


def run(workshop: Scene, *words: str) -> dict:
    """Run a command whose first word is coremill; returns its report."""
    ended = workshop.start([sys.executable, "-m", *words]).end(TIMEOUT_SECONDS)
    assert ended.code == 0, ended
    assert ended.left == []
    return json.loads((newest_run(workshop.folder) / "report.json").read_text())


def newest_run(folder: Path) -> Path:
    return max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def tiny_report(workshop: Scene) -> dict:
    return run(workshop, *header(TINY))


def test_the_tiny_example(workshop: Scene, tiny_report: dict):
    assert tiny_report["state"] == "finished"
    assert tiny_report["steps"] == 20
    assert tiny_report["loss_last"] < tiny_report["loss_first"] - 1.0
    assert tiny_report["padding_fraction"] == 0.0
    names = {path.name for path in (workshop.path("runs") / "tiny-from-scratch").iterdir()}
    assert names >= {"config.yaml", "plan.json", "events", "logs", "export", "report.json", "report.html"}


def test_the_same_command_again_says_that_it_is_done(workshop: Scene, tiny_report: dict):
    ended = workshop.coremill(*header(TINY)[1:])
    assert ended.code == 0 and "finished" in ended.out, ended


def test_the_fine_tuning_example_on_the_model_just_trained(workshop: Scene, tiny_report: dict):
    (workshop.path("models")).mkdir()
    (workshop.path("models") / "my-model").symlink_to(workshop.path("runs") / "tiny-from-scratch" / "export")
    write_text(workshop.path("data") / "train", documents=80, seed=1)
    write_text(workshop.path("data") / "heldout", documents=20, seed=2)
    # The tiny model has 256 positions, and the text here is short.
    settings = [
        "data.sequence_length=64",
        "train.tokens_per_step=512",
        "train.warmup_steps=2",
        "train.learning_rate=1e-3",
    ]
    report = run(workshop, *header(FINE_TUNING), *(word for setting in settings for word in ("--set", setting)))
    assert report["state"] == "finished"
    assert report["loss_last"] < report["loss_first"]
    (bytes_read,) = report["bytes_read_per_rank"]
    assert bytes_read == sum(path.stat().st_size for path in exported(workshop)) - headers(workshop)
    assert report["evaluations"]


def test_the_example_of_conversations(workshop: Scene):
    report = run(workshop, *header(CHAT), "--set", "train.epochs=4")
    assert report["state"] == "finished" and report["evaluations"]
    assert report["loss_last"] < report["loss_first"] - 1.0 and 0 < report["padding_fraction"] < 0.1
    assert (workshop.path("runs") / "chat/export/chat_template.jinja").is_file()


def test_the_example_of_instructions_shows_what_is_learned(workshop: Scene):
    """Nothing is trained: the example above is."""
    ended = workshop.coremill("data", "show", INSTRUCTIONS, "--rows", "1", "--json")
    assert ended.code == 0, ended
    document = json.loads(ended.out)
    assert document["data"]["learn"] == "answers" and document["data"]["documents"] == 100
    learned = [segment["text"] for segment in document["rows"][0]["segments"] if segment["learned"]]
    assert learned and not any("###" in text for text in learned)


def exported(workshop: Scene) -> list[Path]:
    return sorted((workshop.path("models") / "my-model").glob("*.safetensors"))


def headers(workshop: Scene) -> int:
    """Bytes of the files that are no tensors."""
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in exported(workshop))


def plan_of_llama(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *settings: str) -> dict:
    """By the command in its header, which needs no network: the model is gated, its shape lies beside the example."""
    (command,) = [
        line.removeprefix("#")
        for line in (ROOT / LLAMA).read_text().splitlines()
        if line.startswith("#   coremill plan ")
    ]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    app([*shlex.split(command)[1:], *settings, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_the_llama_example_is_planned_offline_as_its_comments_say(monkeypatch, capsys):
    text = (ROOT / LLAMA).read_text()
    plan = plan_of_llama(monkeypatch, capsys)
    assert plan["fits"] and plan["engine"]["value"] == "shard" and plan["nodes"] == 4
    memory, step = plan["memory_bytes_per_rank"], plan["step_seconds"]["total"]
    size = f"{memory['total'] / 1e9:.1f} GB of {memory['limit'] / 1e9:.1f} GB per rank"
    speed = f"{plan['tokens_per_second']:.0f} tokens/s, {step:.1f} s a step"
    cost = f"{plan['steps']} steps in {plan['hours']:.2f} hours for {plan['usd']:.2f} USD"
    assert f"# It says: {size}, {speed}, {cost}.\n" in text

    kept = plan_of_llama(monkeypatch, capsys, "--set", "train.activation_checkpointing=auto")
    assert not kept["activation_checkpointing"]["value"]
    auto = f"{kept['step_seconds']['total']:.1f} s a step, but {kept['memory_bytes_per_rank']['total'] / 1e9:.1f} GB"
    assert f"auto: {auto} per rank\n" in text


def test_the_8_b_states_are_as_its_comment_says(monkeypatch, capsys):
    memory = plan_of_llama(monkeypatch, capsys)["memory_bytes_per_rank"]
    states = sum(memory[part] for part in ("parameters", "gradients", "optimizer"))
    assert f"fp32 AdamW states alone are {states / 1e9:.0f} GB a rank\n" in (ROOT / LLAMA).read_text()
