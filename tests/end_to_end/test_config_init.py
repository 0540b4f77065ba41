"""`coremill config init` at a terminal, as somebody who types; without one: tests/unit/run/test_init.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from coremill.config.load import load_config
from end_to_end.scene import Scene, left_behind
from terminal import Terminal

MARK = f"of-config-init-{uuid4().hex}"


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A model and articles without a column `text`."""
    (tmp_path / "tiny").symlink_to(tiny_model)
    (tmp_path / "articles").mkdir()
    rows = [{"title": f"number {index}", "body": "mills grind, ranks learn, " * 9} for index in range(40)]
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "articles" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@contextmanager
def wizard(folder: Path, cache: Path, *words: str) -> Iterator[Terminal]:
    environ = Scene(folder, cache).environ(MARK, {"HF_HUB_OFFLINE": "1"})
    with Terminal([sys.executable, "-m", "coremill", "config", "init", *words], folder, environ) as terminal:
        yield terminal


def test_a_run_file_by_questions(folder: Path, cache: Path) -> None:
    with wizard(folder, cache, "new.yaml") as terminal:
        terminal.expect("this machine")
        terminal.expect("model  hub id, folder, or built-in")
        terminal.expect("found here: a model of type llama")
        terminal.expect("[tiny] ? for more: ")
        terminal.type("?\n")
        terminal.expect("model.trust_remote_code")
        terminal.type("tinny\n")
        terminal.expect("did you mean tiny?")
        terminal.type("\n")
        terminal.expect("llama, ")
        terminal.expect("[articles/*.jsonl] ? for more: ")
        terminal.type("\n")
        terminal.expect("there is no column text; there are title, body")
        terminal.expect("[body] ? for more: ")
        terminal.type("train.seed=11\n")  # any key, at any question
        terminal.expect("train.seed: 11")
        terminal.type("\n")
        terminal.expect("the model has 64 positions")
        terminal.expect("[64] ? for more: ")
        terminal.type("\n")
        terminal.expect("train.epochs")
        terminal.type("two\n")
        terminal.expect("must be a number above 0")
        terminal.type("2\n")
        terminal.expect("[0.05] ? for more: ")
        terminal.type("\n")
        terminal.expect("fleet.nodes")
        terminal.type("\n")
        terminal.expect("plan")
        terminal.expect("memory")
        terminal.expect("wrote new.yaml")
        terminal.expect("next: coremill train new.yaml")
        assert terminal.ended() == 0
    config = load_config(folder / "new.yaml").config
    assert (config.model.name, config.data.source, config.data.column) == ("tiny", "articles/*.jsonl", "body")
    assert (config.train.epochs, config.train.seed, config.data.sequence_length) == (2.0, 11, 64)
    assert left_behind(MARK) == []


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_whoever_stops_leaves_nothing(folder: Path, cache: Path, key: str) -> None:
    before = sorted(folder.rglob("*"))
    with wizard(folder, cache) as terminal:
        terminal.expect("[tiny] ? for more: ")
        terminal.type("\n")
        terminal.expect("[articles/*.jsonl] ? for more: ")
        terminal.wait_until_it_reads()
        terminal.type(key)
        terminal.expect("nothing was written")
        assert terminal.ended() == 130
    assert sorted(folder.rglob("*")) == before


def test_what_cannot_be_checked_is_kept_where_it_is_said_twice(folder: Path, cache: Path) -> None:
    with wizard(folder, cache, "--answer", "model=tiny", "--answer", "train.epochs=1", "far.yaml") as terminal:
        terminal.expect("[articles/*.jsonl] ? for more: ")
        terminal.type("/fsx/books/*.txt\n")
        terminal.expect("type another, or the same again to keep it")
        terminal.type("/fsx/books/*.txt\n")
        terminal.expect("kept as you say")
        for _ in range(3):
            terminal.expect("? for more: ")
            terminal.type("\n")
        terminal.expect("wrote far.yaml")
        assert terminal.ended() == 0
    assert load_config(folder / "far.yaml").config.data.source == "/fsx/books/*.txt"
