"""Conversations from the command line: trained on their answers, evaluated on answers, asked through the template."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from end_to_end.scene import Ended, Scene
from unit.data.chat_templates import FAMILIES, make_chat_tokenizer

RUN_FILE = """\
model:
  weights: random
  config: {model_type: llama, vocab_size: 400, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}
tokenizer: chat
data: {source: chats.jsonl, chat_template: chat.jinja, sequence_length: 128, evaluation_fraction: 0.2}
train: {steps: 4, tokens_per_step: 512, learning_rate: 1.0e-2}
parallel: {dtype: fp32, wire_dtype: fp32, threads_per_rank: 1}
sample: {prompt: who are you?, tokens: 4}
"""


@pytest.fixture(scope="module")
def chat(scene: Scene) -> Scene:
    make_chat_tokenizer(scene.path("chat"), FAMILIES["chatml"], template=False)
    scene.path("chat.jinja").write_text(FAMILIES["chatml"].template)
    turns = [("human", "who are you?"), ("gpt", "I am a mill."), ("human", "and?"), ("gpt", "numbers go in")]
    rows = [
        {"conversations": [{"from": who, "value": f"{said} {'mill ' * (index % 5)}"} for who, said in turns]}
        for index in range(30)
    ]
    scene.path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scene.path("chat.yaml").write_text(RUN_FILE)
    return scene


def trained(chat: Scene, folder: str, *words: str) -> Ended:
    done = chat.coremill("train", "chat.yaml", "--set", f"run.folder={folder}", *words)
    assert done.code == 0 and not done.left, str(done)
    return done


@pytest.fixture(scope="module")
def two_ranks(chat: Scene) -> Ended:
    return trained(chat, "two", "--nproc", "2", "--set", "parallel.engine=shard")


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events/rank-00000.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_what_is_said_and_written_of_it(chat: Scene, two_ranks: Ended) -> None:
    folder = chat.path("two")
    assert "chats.jsonl holds conversations: the form of ShareGPT, known by column 'conversations'" in two_ranks.out
    assert "of them learned (" in two_ranks.out
    (data,) = events(folder, "data")
    assert 0 < data["learned_tokens"] < data["tokens"] and data["row_padding_tokens"] > 0 and data["learn"] == "answers"
    (documents,) = [event for event in events(folder, "choice") if event["name"] == "documents"]
    assert documents["value"] == "apart"
    steps = events(folder, "step")
    assert all(step["padding_tokens"] > 0 and step["tokens"] + step["padding_tokens"] == 512 for step in steps)
    report = json.loads((folder / "report.json").read_text())
    assert 0 < report["padding_fraction"] < 0.5 and report["loss_last"] < report["loss_first"]
    (evaluation,) = report["evaluations"]
    assert evaluation["loss"] < report["loss_first"] and evaluation["tokens"] < data["tokens"]
    (sample,) = events(folder, "sample")
    assert sample["prompt"] == "who are you?" and "completion" in sample
    template = FAMILIES["chatml"].template
    assert (folder / "export/chat_template.jinja").read_text() == template


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="unit tests hold the loss of packed conversations: COREMILL_LONG_TESTS=1 runs it",
)
def test_the_same_loss_on_one_rank_whole(chat: Scene, two_ranks: Ended) -> None:
    """The loss is divided by the learned tokens of the step, wherever they are."""
    trained(chat, "one", "--nproc", "1", "--set", "parallel.engine=replicate", "--set", "train.micro_batch_rows=1")
    losses = [[step["loss"] for step in events(chat.path(name), "step")] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 4


def test_another_way_to_learn_is_another_run(chat: Scene, two_ranks: Ended) -> None:
    words = ("--set", "run.folder=two", "--set", "data.learn=all", "--set", "train.steps=6", "--nproc", "2")
    done = chat.coremill("train", "chat.yaml", *words)
    assert done.code == 78 and "data.learn was answers, is all" in done.err, str(done)


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"messages": [{"content": "who?"}]}, (), "message 1 has no role"),
        ({"messages": [{"role": "user", "content": "who?"}]}, (), "no answer of the assistant"),
        (None, ("data.chat_template=null",), "the tokenizer has no chat template"),
        (None, ("data.chat_template=nowhere.jinja",), "the chat template cannot be read"),
    ],
)
def test_bad_conversations_end_it_before_a_rank_starts(chat: Scene, row: Any, settings: Any, words: str) -> None:
    if row is not None:
        chat.path("bad.jsonl").write_text(json.dumps(row) + "\n")
        settings = (*settings, "data.source=bad.jsonl")
    shutil.rmtree(chat.path("refused"), ignore_errors=True)
    sets = [word for item in (*settings, "run.folder=refused") for word in ("--set", item)]
    done = chat.coremill("train", "chat.yaml", *sets)
    assert done.code == 78 and not done.left, str(done)
    assert done.err.startswith("coremill: ") and words in done.err and "  do: " in done.err, str(done)
    assert not list(chat.path("refused").glob("events/rank-*"))
