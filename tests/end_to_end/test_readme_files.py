"""The run files of the README train as they stand there: small models and a little data are put in their places."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from end_to_end.scene import Scene
from tiers import long_test
from tiny_encoders import make_encoder, sentences
from tiny_models import make_model
from unit.data.chat_templates import FAMILIES, make_chat_tokenizer

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
# In place of what the README names and is not here; rows and steps as short as the positions and texts of these.
SETTINGS = {
    "text.yaml": ("model=model", "data.source=text/*.jsonl", "data.sequence_length=32", "train.tokens_per_step=256"),
    "chat.yaml": ("model=chat", "data.sequence_length=128", "train.tokens_per_step=512"),
    "labels.yaml": ("model=encoder",),
}


def run_files() -> dict[str, str]:
    """By name: each block of YAML, named by the first `coremill train` below it."""
    found = re.findall(r"^```yaml\n(.*?)^```$.*?^coremill train (\S+\.yaml)$", README, flags=re.DOTALL | re.MULTILINE)
    return {name: block for block, name in found}


def put_data(scene: Scene) -> None:
    positions = {"vocab_size": 400, "max_position_embeddings": 128}
    make_chat_tokenizer(make_model(scene.path("chat"), "qwen2", **positions), FAMILIES["chatml"])
    turns = [{"role": "user", "content": "who are you?"}, {"role": "assistant", "content": "I am a mill."}]
    scene.path("chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    make_encoder(scene.path("encoder"), weights=True)
    rows = [f"{row['text']},{row['label']}" for row in sentences(64, seed=1, names=True)]
    scene.path("reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")


def test_every_run_file_of_the_readme_is_known() -> None:
    assert run_files().keys() == SETTINGS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_run_files_of_the_readme_train(scene: Scene, name: str) -> None:
    if not scene.path("chats.jsonl").exists():
        put_data(scene)
    scene.path(name).write_text(run_files()[name])
    settings = [word for setting in SETTINGS[name] for word in ("--set", setting)]
    ended = scene.coremill("train", name, *settings)
    assert ended.code == 0 and not ended.left, ended
    run = scene.path("runs") / Path(name).stem
    report = json.loads((run / "report.json").read_text())
    assert report["state"] == "finished"
    assert report["export"]["form"] == ("adapter" if name == "chat.yaml" else "model")


@long_test("the run files above train by the same code, and dry runs name what a first try takes")
def test_a_first_try_needs_no_run_file(scene: Scene) -> None:
    scene.path("notes").mkdir()
    scene.path("notes/one.txt").write_text("the mill turns and the store holds\n" * 200)
    ended = scene.coremill("train", "--model", "model", "--data", "notes/*.txt", "--set", "data.sequence_length=32")
    assert ended.code == 0 and not ended.left, ended
    (run,) = scene.path("runs").glob("model-notes-*")
    assert json.loads((run / "report.json").read_text())["state"] == "finished"


@long_test("the tiny example learns the same text with the same kind of tokenizer")
def test_the_built_in_example_trains(scene: Scene) -> None:
    """What `make demo` runs, but for its length."""
    shorter = ("train.steps=3", "train.warmup_steps=1", "evaluation.rows=4")
    ended = scene.coremill("train", *(word for setting in shorter for word in ("--set", setting)))
    assert ended.code == 0 and not ended.left, ended
    assert json.loads((scene.path("runs") / "built-in" / "report.json").read_text())["steps"] == 3
