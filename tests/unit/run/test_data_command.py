"""`coremill data show` as users type it, in this process: what is on the screen, through a pipe, and as JSON."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from coremill.cli import app
from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.data.packed_batches import IGNORED, make_loader
from coremill.data.token_text import load_token_text
from coremill.data.tokenise import prepare_data
from coremill.errors import InputError
from coremill.run.data_command import show_data, visible
from coremill.tasks.base import make_task
from tiny_encoders import make_encoder, questions, sentences, write_jsonl
from unit.data.small_tokenizer import make_tokenizer

SHAPE = """\
model:
  weights: random
  config: {model_type: llama, vocab_size: 300, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64}
tokenizer: tokenizer
train: {steps: 2, tokens_per_step: 64}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_tokenizer(tmp_path / "tokenizer", around="<begin> $A")
    songs = [f"song {index}: grüße an die mühle 🙂" for index in range(30)]
    (tmp_path / "songs.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": song}) + "\n" for song in songs).encode())
    )
    (tmp_path / "notes.csv").write_text(
        "id;body\n" + "".join(f"{index};a note \x1b[31m on {index}\n" for index in "abc")
    )
    sources = "[{source: songs.jsonl.gz, share: 0.75}, {source: notes.csv, column: body, share: 0.25}]"
    (tmp_path / "run.yaml").write_text(
        f"{SHAPE}data: {{sources: {sources}, sequence_length: 16, evaluation_fraction: 0.2}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COREMILL_CACHE", str(cache))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app(["data", "show", *words], standalone_mode=False)
    return capsys.readouterr().out


def refused(*words: str) -> InputError:
    with pytest.raises(InputError) as caught:
        app(["data", "show", *words], standalone_mode=False)
    assert caught.value.exit_code == 78
    return caught.value


def test_rows_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, "run.yaml", "--rows", "8", "--json"))
    assert document["split"] == "train" and document["task"] == "causal-lm" and len(document["rows"]) == 8
    assert [source["share_asked"] for source in document["data"]["sources"]] == [0.75, 0.25]
    assert [row["source"] for row in document["rows"]].count("notes.csv") == 2  # a quarter, in every stretch
    for row in document["rows"]:
        assert row["tokens"] == 16 == sum(len(segment["ids"]) for segment in row["segments"])
        assert row["learned_tokens"] == 15
        assert row["documents"] == 1 + sum(segment["starts_document"] for segment in row["segments"])
        for segment in row["segments"]:
            assert segment["special"] == (segment["text"] in ("<begin>", "<end>"))
    texts = ["".join(segment["text"] for segment in row["segments"]) for row in document["rows"]]
    assert any("<end><begin>" in text for text in texts)
    held_out = json.loads(shown(capsys, "run.yaml", "--evaluation", "--json"))
    assert held_out["split"] == "evaluation" and held_out["rows_total"] == document["data"]["evaluation_rows"]
    assert [row["row"] for row in held_out["rows"]] == [0, 1, 2]


def test_through_a_pipe_it_is_plain_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "run.yaml", "--rows", "4")
    assert "\x1b" not in out and "what is learned stands between « and »" in out
    assert any(line.split()[:3] == ["notes.csv", "25.0", "%"] for line in out.splitlines())  # in the table of sources
    assert "notes.csv is read with semicolons between its columns" in out
    assert "--- next document ---" in out and "16 tokens, 15 of them learned" in out
    assert out.count("«") - 1 == out.count("»") - 1 >= 4


def test_of_examples_it_says_where_to_look(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_encoder(folder / "encoder")
    write_jsonl(folder / "texts.jsonl", sentences(8))
    write_jsonl(folder / "questions.jsonl", questions(8))
    write_jsonl(folder / "asked.jsonl", questions(1))
    run = "model: {name: encoder, weights: random}\ntrain: {steps: 1, samples_per_step: 4}\n"
    texts = "task: sequence-classification\ndata: {source: texts.jsonl, text_columns: [text], sequence_length: 48}\n"
    (folder / "texts.yaml").write_text(run + texts)
    out = shown(capsys, "texts.yaml")
    assert "no token is learned: what is stands above each row" in out and "«" not in out and ", label " in out
    asked = "{source: questions.jsonl, evaluation_source: asked.jsonl, sequence_length: 128, doc_stride: 16}"
    (folder / "questions.yaml").write_text(f"{run}task: question-answering\ndata: {asked}\n")
    out = shown(capsys, "questions.yaml")
    assert "what is learned stands between « and »" in out and "of 1 question to evaluate on" in out


def test_on_a_terminal_what_is_learned_is_coloured(folder: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard", width=80)
    settings = ["data.attention_across_documents=false"]
    show_data(load_config(Path("run.yaml"), settings), rows=4, evaluation=False, as_json=False, console=console)
    out = screen.getvalue()
    assert "\x1b[1;35m<begin>" in out and "\x1b[32m" in out and "\x1b[90m" in out and "«" not in out
    assert "\x1b[31m" not in out  # of the text itself: shown, not obeyed


def test_what_would_move_the_cursor_is_shown() -> None:
    assert visible("a\x1b[31m\x7f\r\n\tb") == "a␛[31m␡␍\n\tb"


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("around", ["<begin> $A", "<end> $A"])
def test_what_is_shown_as_learned_has_a_label(
    tmp_path: Path, folder: Path, cache: Path, across: bool, around: str
) -> None:
    tokenizer = make_tokenizer(tmp_path / "other", around=around)
    data = {"source": str(folder / "songs.jsonl.gz"), "sequence_length": 16, "attention_across_documents": across}
    config = RunConfig.model_validate({"data": data, "train": {"steps": 1}})
    packed = prepare_data(config, tokenizer_folder=tokenizer, vocabulary_rows=300, max_positions=None, cache=cache)
    rows = make_task(config).shown_rows(packed, count=6, evaluation=False)
    (batch,) = (
        make_loader(
            packed,
            seed=config.train.seed,
            rows_per_step=6,
            rank=0,
            world_size=1,
            micro_batch_rows=6,
            accumulation_steps=1,
            attention_across_documents=across,
        )
        .next_step()
        .batches
    )
    assert [row.row for row in rows] == list(batch.row_ids)
    assert [list(row.ids) for row in rows] == batch.input_ids.tolist()
    assert [list(row.learned)[1:] for row in rows] == (batch.labels != IGNORED)[:, 1:].tolist()
    assert not any(row.learned[0] for row in rows)
    if batch.position_ids is not None:
        borders = [np.flatnonzero(np.array(row[1:]) == 0) + 1 for row in batch.position_ids.tolist()]
        assert [list(row.document_starts) for row in rows] == [each.tolist() for each in borders]


def test_segments_put_together_are_the_text(folder: Path) -> None:
    text = load_token_text(folder / "tokenizer", code_sha256=None, cache=folder)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")).encode("eine 🙂 mühle<end>und mehr").ids
    segments = list(text.segments(ids, [False] + [True] * (len(ids) - 1), [ids.index(0) + 1]))
    assert "".join(segment.text for segment in segments) == "<begin>eine 🙂 mühle<end>und mehr"
    assert [segment.special for segment in segments] == [True, False, True, False]
    assert [segment.learned for segment in segments] == [False, True, True, True]
    assert [segment.starts_document for segment in segments] == [False, False, False, True]


def test_a_task_that_shows_nothing_gets_a_plain_answer(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from coremill.tasks.base import Task
    from coremill.tasks.causal_lm import CausalLm

    monkeypatch.setattr(CausalLm, "shown_rows", Task.shown_rows)
    assert "the task causal-lm has nothing to show of a row" in shown(capsys, "run.yaml")


Arrange = Callable[[Path], None]


def files(**content: str) -> Arrange:
    def write(folder: Path) -> None:
        for name, text in content.items():
            path = folder / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write


REFUSED: dict[str, tuple[Arrange, str, str, str]] = {
    "shares off": (files(), "data.sources=[{source: a.txt, share: 0.7}, {source: b.txt, share: 0.2}]", "0.9", "0.7778"),
    "negative share": (files(), "data.sources=[{source: a.txt, share: -1}]", "must be a number above 0", "above 0"),
    "a share of some": (files(), "data.sources=[{source: a.txt, share: 0.7}, b.txt]", "has no share", "share: 0.3"),
    "twice": (files(), "data.sources=[a.txt, b.txt, a.txt]", "a.txt twice", "keep one"),
    "twice by glob": (
        files(a_txt="x", b_txt="y"),
        "data.sources=[a.txt, '*.txt']",
        "the same text is in two of the sources",
        "in one source only",
    ),
    "both": (files(), "data.source=a.txt", "data.sources is given together with data.source", "keep one"),
    "compression": (files(a_jsonl_bz2="x"), "data.sources=[a.jsonl.bz2]", "packed in a way", "bunzip2"),
    "mixed folder": (files(mixed__a_csv="text\nx", mixed__b_txt="x"), "data.sources=[mixed]", "kinds", "glob"),
    "empty csv": (files(a_csv=""), "data.sources=[a.csv]", "no header", "names of the columns"),
    "column": (files(a_csv="id,txt\n1,x\n"), "data.sources=[a.csv]", "did you mean 'txt'", "data.column"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_one_message(folder: Path, name: str) -> None:
    arrange, setting, what, do = REFUSED[name]
    arrange(folder)
    problem = refused("run.yaml", "--set", setting)
    problem = getattr(problem, "problems", [problem])[0]
    assert what in problem.what and do in str(problem.do), problem
    assert "data.source" in str(problem.where) or ".csv" in str(problem.where), problem


def test_rows_and_evaluation_that_are_none(folder: Path) -> None:
    assert "--rows 0 shows nothing" in refused("run.yaml", "--rows", "0").what
    without: Any = refused("run.yaml", "--evaluation", "--set", "data.evaluation_fraction=0")
    assert without.what == "there are no rows to evaluate on" and "evaluation_fraction=0.05" in without.do
