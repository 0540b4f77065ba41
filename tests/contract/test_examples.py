"""Every example runs: the first line of a run file is the command that runs it, and here it is run.

What an example needs and the repository does not have (a model, text files, a hub) is put in its place: the fine-tuning
example trains the model that the example before it left.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from house import ROOT

from coremill.cli import app
from end_to_end.scene import Scene, make_cache, write_text
from tiers import long_test
from tiny_encoders import make_encoder, questions, sentences, write_jsonl

EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.yaml"))
TINY = "examples/tiny-from-scratch.yaml"
FINE_TUNING = "examples/finetune-files.yaml"
LLAMA, LLAMA_ALONE = "examples/llama3-8b-wikitext.yaml", "examples/llama3-8b-one-machine.yaml"
CHAT, CHAT_LORA, INSTRUCTIONS = "examples/chat.yaml", "examples/chat-lora.yaml", "examples/instructions.yaml"
SQUAD, SQUAD_HOSTS = "examples/bert-large-squad.yaml", "examples/bert-large-squad-2-hosts.yaml"
MRPC, MRPC_LORA = "examples/mrpc.yaml", "examples/mrpc-lora.yaml"
# Two real runs: half a minute on a machine with nothing else to do, many times that on a shared one.
TIMEOUT_SECONDS = 800
pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS + 60)


def header(example: str) -> list[str]:
    """The command in the first line."""
    first = (ROOT / example).read_text().splitlines()[0]
    assert first.startswith("# coremill ")
    return shlex.split(first.removeprefix("# "))


def test_every_example_is_tried():
    assert set(EXAMPLES) == {
        *(TINY, FINE_TUNING, LLAMA, LLAMA_ALONE, CHAT, CHAT_LORA, INSTRUCTIONS),
        *(SQUAD, SQUAD_HOSTS, MRPC, MRPC_LORA),
    }


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


@long_test("the tiny example is trained, and chat starts from a folder")
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


@pytest.fixture(scope="module")
def chat_report(workshop: Scene) -> dict:
    return run(workshop, *header(CHAT), "--set", "train.epochs=4")


@long_test("test_chat.py trains whole models on conversations, test_readme_files.py adapters")
def test_the_example_of_conversations(workshop: Scene, chat_report: dict):
    assert chat_report["state"] == "finished" and chat_report["evaluations"]
    assert chat_report["loss_last"] < chat_report["loss_first"] - 1.0 and 0 < chat_report["padding_fraction"] < 0.1
    assert (workshop.path("runs") / "example-chat/export/chat_template.jinja").is_file()


@long_test("test_lora_export.py loads adapters, test_readme_files.py trains them on conversations")
def test_adapters_on_conversations_leave_what_peft_loads(workshop: Scene, chat_report: dict):
    report = run(workshop, *header(CHAT_LORA), "--set", "train.epochs=2")
    assert report["state"] == "finished" and report["loss_last"] < report["loss_first"]
    export = workshop.path("runs") / "example-chat-lora/export"
    assert {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"} <= {
        path.name for path in export.iterdir()
    }
    assert report["sample"]["completion"] is not None


@long_test("test_lora_export.py merges by the command")
def test_adapters_on_instructions_are_merged(workshop: Scene, chat_report: dict):
    shown = workshop.coremill("data", "show", INSTRUCTIONS, "--rows", "1", "--json")
    assert shown.code == 0, shown
    document = json.loads(shown.out)
    assert document["data"]["learn"] == "answers" and document["data"]["documents"] == 100
    learned = [segment["text"] for segment in document["rows"][0]["segments"] if segment["learned"]]
    assert learned and not any("###" in text for text in learned)
    report = run(workshop, *header(INSTRUCTIONS), "--set", "train.epochs=2")
    assert report["state"] == "finished" and report["export"]["form"] == "merged"
    names = {path.name for path in (workshop.path("runs") / "instructions/export").iterdir()}
    assert "model.safetensors" in names and "adapter_config.json" not in names


@pytest.fixture(scope="module")
def encoder(workshop: Scene) -> list[str]:
    """In place of the hub: an encoder with weights of its own and a few examples; rows as short as its positions."""
    make_encoder(workshop.path("encoder"), weights=True)
    data = workshop.path("examples-of-encoders")
    data.mkdir()
    for name, seed in (("train", 1), ("validation", 2)):
        write_jsonl(data / f"squad-{name}.jsonl", questions(80 if seed == 1 else 20, seed=seed))
        write_jsonl(data / f"mrpc-{name}.jsonl", sentences(160 if seed == 1 else 40, seed=seed, pairs=True))
    return ["model=encoder", "data.evaluation_split=null", "data.sequence_length=64", "train.learning_rate=1e-3"]


LONG = pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="tests/distributed/test_encoders.py trains so with ranks in memory: COREMILL_LONG_TESTS=1 runs it",
)


def of_files(settings: list[str], name: str, *more: str) -> list[str]:
    train, held_out = (f"examples-of-encoders/{name}-{split}.jsonl" for split in ("train", "validation"))
    named = [*settings, f"data.source={train}", f"data.evaluation_source={held_out}", *more]
    return [word for setting in named for word in ("--set", setting)]


SHORTER_QUESTIONS = ("data.doc_stride=16", "train.epochs=1")


@LONG
def test_questions(workshop: Scene, encoder: list[str]):
    report = run(workshop, *header(SQUAD), *of_files(encoder, "squad", *SHORTER_QUESTIONS))
    assert report["state"] == "finished" and set(report["metrics"]) >= {"f1", "exact_match"}
    assert {"predictions.json", "nbest_predictions.json"} <= {
        path.name for path in (workshop.path("runs") / "bert-large-squad").iterdir()
    }


@LONG
def test_questions_on_four_ranks(workshop: Scene, encoder: list[str]):
    """On one host; tests/hosts start ranks on several."""
    of_host = ("fleet.nodes=1", "parallel.ranks_per_node=4", "train.samples_per_step=16", "evaluation.every_steps=3")
    report = run(workshop, *header(SQUAD_HOSTS), *of_files(encoder, "squad", *SHORTER_QUESTIONS, *of_host))
    assert report["state"] == "finished" and len(report["peak_rss_bytes_per_rank"]) == 4
    assert report["best"]["step"] == report["export"]["step"]


@long_test("test_readme_files.py trains a classifier, test_encoder_runs.py loads one")
def test_pairs_of_sentences(workshop: Scene, encoder: list[str]):
    shorter = ("train.warmup_steps=2", "train.epochs=1", "evaluation.every_steps=5")
    report = run(workshop, *header(MRPC), *of_files(encoder, "mrpc", *shorter))
    assert report["state"] == "finished" and set(report["metrics"]) >= {"accuracy", "f1"}
    assert report["export"]["form"] == "model" and report["padding_fraction"] < 0.2


@LONG
def test_adapters_on_pairs_of_sentences(workshop: Scene, encoder: list[str]):
    report = run(workshop, *header(MRPC_LORA), *of_files(encoder, "mrpc", "train.epochs=1"))
    assert report["state"] == "finished" and report["export"]["form"] == "adapter"
    assert 0 < report["subject"]["trainable_parameters"] < report["subject"]["parameters"]


def exported(workshop: Scene) -> list[Path]:
    return sorted((workshop.path("models") / "my-model").glob("*.safetensors"))


def headers(workshop: Scene) -> int:
    """Bytes of the files that are no tensors."""
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in exported(workshop))


def plan_of_llama(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *settings: str, example: str = LLAMA
) -> dict:
    """By the command in its header, which needs no network: the model is gated, its shape lies beside the example."""
    (command,) = [
        line.removeprefix("#")
        for line in (ROOT / example).read_text().splitlines()
        if line.startswith("#   coremill plan ")
    ]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    app([*shlex.split(command)[1:], *settings, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def what_it_says(plan: dict) -> str:
    memory, step = plan["memory_bytes_per_rank"], plan["step_seconds"]["total"]
    size = f"{memory['total'] / 1e9:.1f} GB of {memory['limit'] / 1e9:.1f} GB per rank"
    speed = f"{plan['tokens_per_second']:.0f} tokens/s, {step:.1f} s a step"
    cost = f"{plan['steps']} steps in {plan['hours']:.2f} hours for {plan['usd']:.2f} USD"
    return f"# It says: {size}, {speed}, {cost}.\n"


def test_the_llama_example_is_planned_offline_as_its_comments_say(monkeypatch, capsys):
    text = (ROOT / LLAMA).read_text()
    plan = plan_of_llama(monkeypatch, capsys)
    assert plan["fits"] and plan["engine"]["value"] == "shard" and plan["nodes"] == 4
    assert what_it_says(plan) in text

    kept = plan_of_llama(monkeypatch, capsys, "--set", "train.activation_checkpointing=auto")
    assert not kept["activation_checkpointing"]["value"]
    auto = f"{kept['step_seconds']['total']:.1f} s a step, but {kept['memory_bytes_per_rank']['total'] / 1e9:.1f} GB"
    assert f"auto: {auto} per rank\n" in text


def test_the_8_b_states_are_as_its_comment_says(monkeypatch, capsys):
    memory = plan_of_llama(monkeypatch, capsys)["memory_bytes_per_rank"]
    states = sum(memory[part] for part in ("parameters", "gradients", "optimizer"))
    assert f"fp32 AdamW states alone are {states / 1e9:.0f} GB a rank\n" in (ROOT / LLAMA).read_text()


def test_the_llama_example_on_one_machine_is_planned_as_its_comments_say(monkeypatch, capsys):
    def planned(*settings: str) -> dict:
        words = [word for setting in settings for word in ("--set", setting)]
        return plan_of_llama(monkeypatch, capsys, *words, example=LLAMA_ALONE)

    text, plan = (ROOT / LLAMA_ALONE).read_text(), planned()
    assert plan["fits"] and plan["nodes"] == plan["world_size"] == plan["accumulation_steps"]["value"] == 1
    assert (plan["optimizer"]["value"], plan["update"]["value"]) == ("adamw-8bit", "inside")
    assert what_it_says(plan) in text and f"# {plan['save']['bytes'] / 1e9:.0f} GB: weights and moments" in text

    def gigabytes(other: dict) -> float:
        return other["memory_bytes_per_rank"]["total"] / 1e9

    masters, after = planned("train.optimizer=adamw"), planned("train.update=after")
    assert not masters["fits"] and f"; adamw needs {gigabytes(masters):.0f} GB\n" in text
    assert f"; after: {gigabytes(after):.1f} GB\n" in text
    # What the four machines' run file is told on one of them.
    (first, *_) = plan_of_llama(monkeypatch, capsys, "--fleet", "1xc7i.8xlarge")["remedies"]
    assert first["settings"] == ["train.optimizer=adamw-8bit"]
