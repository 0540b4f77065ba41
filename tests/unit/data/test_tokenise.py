from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from small_tokenizer import make_tokenizer

from coremill.config.schema import RunConfig
from coremill.data import cache as cache_module
from coremill.data import child_process
from coremill.data import tokenise as prepare
from coremill.data.packed import FORMAT_VERSION, PackedData, Progress, read_manifest
from coremill.data.packed_batches import PackedRows
from coremill.data.tokenise import prepare_data, require_rows_for_ranks
from coremill.errors import CoremillError, InputError

DOCUMENTS = [f"document {index} holds some words about the mill and the store" for index in range(40)]
MakeConfig = Callable[..., RunConfig]
Texts = Callable[..., Path]


def prepared(config: RunConfig, tokenizer_folder: Path, cache: Path, **more: Any) -> PackedData:
    options: dict[str, Any] = {"vocabulary_rows": 300, "max_positions": None, **more}
    return prepare_data(config, tokenizer_folder=tokenizer_folder, cache=cache, **options)


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on starting a process fails."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs run here instead of in a child, for tests of what happens around them."""
    from coremill.data.tokenise_child import Speaker, do_job

    jobs: list[str] = []

    def run(job: dict[str, Any], on_progress: object = None) -> dict[str, Any]:
        jobs.append(job["source"]["name"] if job["job"] == "tokenise" else job["job"])
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            return do_job(job, Speaker(nowhere))

    monkeypatch.setattr(prepare, "run_in_child", run)
    return jobs


def test_the_child_packs_and_the_cache_answers_the_second_time(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, told = run_config(texts(*DOCUMENTS)), []
    before = set(psutil.Process().children(recursive=True))  # tests may share a pool of ranks with this process
    data = prepared(config, tokenizer_folder, tmp_path / "cache", progress=told.append)
    assert not data.from_cache and data.documents == 40 and data.evaluation_rows == 0 and data.seconds > 0
    assert told and isinstance(told[-1], Progress) and told[-1].stage == "tokenise" and told[-1].documents_done == 40
    assert not set(psutil.Process().children(recursive=True)) - before
    tokens = np.fromfile(data.folder / "tokens.bin", np.uint16)[: data.tokens].reshape(data.train_rows, 8)
    assert (tokens == data.eos_id).any() and data.tokens == tokens.size
    assert sorted(path.name for path in data.folder.iterdir()) == [
        "boundaries.bin",
        "documents.bin",
        "manifest.json",
        "tokens.bin",
    ]

    monkeypatch.setattr(subprocess, "Popen", None)
    again = prepared(config, tokenizer_folder, tmp_path / "cache")
    assert again.from_cache and again.key == data.key and again.folder == data.folder
    assert PackedData.from_json(json.loads(json.dumps(data.to_json()))) == data


def test_errors_cross_from_the_child(run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n{"text": null}\n')
    with pytest.raises(InputError) as caught:
        prepared(run_config(path), tokenizer_folder, tmp_path / "cache")
    assert "column 'text' holds null" in caught.value.what and caught.value.where == f"{path}:2" and caught.value.do
    assert not [path for path in (tmp_path / "cache" / "data").iterdir() if "partial" in path.name]


def test_a_child_that_is_killed_is_said_to_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "CHILD_MODULE", "coremill_no_such_module")
    with pytest.raises(CoremillError, match="ended with status 1") as caught:
        child_process.run_in_child({"job": "none"})
    assert "No module named" in str(caught.value)

    real = subprocess.Popen

    def stillborn(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        child = real([sys.executable, "-c", "import time; time.sleep(60)"], **options)
        child.kill()
        child.wait()
        return child

    monkeypatch.setattr(subprocess, "Popen", stillborn)
    with pytest.raises(CoremillError, match="was killed") as caught:
        child_process.run_in_child({"job": "none"})
    assert "memory limit" in str(caught.value)


def test_the_child_dies_with_its_parent_and_with_ctrl_c(texts: Texts, tokenizer_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "endless.txt"
    os.mkfifo(source)  # reading it blocks the child for as long as we like
    program = f"""
from coremill.data.child_process import run_in_child
job = {{"job": "tokenise", "tokenizer_folder": {str(tokenizer_folder)!r}, "sequence_length": 8, "vocabulary_rows": 300,
    "destination": {str(tmp_path)!r}, "special_tokens": "auto", "code_sha256": None, "cache": {str(tmp_path)!r},
    "source": {{"name": "x", "setting": "data.source", "kind": "txt",
    "column": "text", "files": [{str(source)!r}], "dataset": None}}}}
run_in_child(job)
"""
    for end in (signal.SIGKILL, signal.SIGINT):
        parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
        children: list[psutil.Process] = []
        while not children:
            assert parent.poll() is None
            children = psutil.Process(parent.pid).children()
            time.sleep(0.02)
        while not (tmp_path / "tokens.bin").exists():  # the child is at work
            assert parent.poll() is None and children[0].is_running()
            time.sleep(0.02)
        (tmp_path / "tokens.bin").unlink()
        parent.send_signal(end)
        parent.wait(timeout=30)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive


def test_the_key_follows_text_tokenizer_length_and_column(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    cache = tmp_path / "cache"
    source = tmp_path / "own.jsonl"
    lines = [json.dumps({"text": document, "other": document.upper()}) for document in DOCUMENTS]
    source.write_text("\n".join(lines))

    def folder(tokenizer: Path = tokenizer_folder, rows: int = 400, **data: object) -> Path:
        return prepared(run_config(source, **data), tokenizer, cache, vocabulary_rows=rows).folder

    first = folder()
    assert folder() == first and len(in_process) == 1
    other_tokenizer = make_tokenizer(tmp_path / "other", vocabulary=310)
    found = {first, folder(other_tokenizer), folder(sequence_length=9), folder(column="other")}
    copied = tmp_path / "elsewhere.jsonl"
    copied.write_text(source.read_text())
    assert prepared(run_config(copied), tokenizer_folder, cache).folder == first  # content, not path
    source.write_text("\n".join([*lines, lines[0]]))
    found.add(folder())
    assert len(found) == 5 == len(in_process)


def test_seed_and_fraction_choose_documents_without_tokenising_again(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    path, cache = texts(*DOCUMENTS), tmp_path / "cache"
    whole = prepared(run_config(path), tokenizer_folder, cache)
    split = prepared(run_config(path, evaluation_fraction=0.1), tokenizer_folder, cache)
    assert split.evaluation_rows == pytest.approx(whole.train_rows * 0.1, abs=2) and split.evaluation_documents == 4
    assert split.documents == 40 and split.tokens + split.dropped_tokens == whole.tokens + whole.dropped_tokens
    assert split.evaluation_words.startswith("held out for evaluation: 4 of 40 documents, ")
    other = prepared(run_config(path, evaluation_fraction=0.1, seed=8), tokenizer_folder, cache)
    assert len({whole.key, split.key, other.key}) == 3
    tiny = prepared(run_config(path, evaluation_fraction=1e-9), tokenizer_folder, cache)
    assert tiny.evaluation_documents == 1
    assert in_process == [str(path), *["hold out"] * 3]
    again = prepared(run_config(path, evaluation_fraction=0.1), tokenizer_folder, cache)
    assert again.from_cache and again.key == split.key and again.evaluation_words == split.evaluation_words
    assert PackedData.from_json(json.loads(json.dumps(split.to_json()))) == split


def test_older_splits_are_dropped_but_those_in_use(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    path, cache = texts(*DOCUMENTS), tmp_path / "cache"
    folders = []
    for seed in range(1, 7):
        data = prepared(run_config(path, evaluation_fraction=0.1, seed=seed), tokenizer_folder, cache)
        folders.append(data.folder.parent)
        os.utime(folders[-1].with_name(f".{folders[-1].name}.use"), (seed, seed))
        if seed > 1:  # the first run goes on, the others have ended
            cache_module._IN_USE.pop(folders[-1]).close()
    assert [folder.exists() for folder in folders] == [True, False, False, True, True, True]
    assert PackedRows(data, "train").count == data.train_rows  # the packing they are made of stays too


def test_the_tail_of_one_of_several_documents_is_said(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    path = texts(" ".join(DOCUMENTS), "a note")
    data = prepared(run_config(path, evaluation_fraction=0.1), tokenizer_folder, tmp_path / "cache")
    assert data.evaluation_words.startswith("held out for evaluation: the tail of one of 2 documents, for no choice")
    assert data.train_in_words().endswith("in all) from 2 documents")  # the one that was cut is in both
    assert data.documents == 2 and 0.05 < data.evaluation_rows / data.train_rows < 0.2


def test_of_one_long_text_the_tail_is_held_out_and_said(
    run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n".join(DOCUMENTS))
    data = prepared(run_config(path, evaluation_fraction=0.1), tokenizer_folder, tmp_path / "cache")
    share = f"{data.evaluation_rows} of {data.train_rows + data.evaluation_rows} rows (10."
    words = f"held out for evaluation: the tail of the text, which is one document: {share}"
    assert data.evaluation_words.startswith(words) and data.documents == 1
    assert data.train_in_words().endswith("in all) from 1 document")


def test_evaluation_source_is_packed_apart(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    train, evaluation = texts(*DOCUMENTS), texts(*DOCUMENTS[:5], name="evaluation.jsonl")
    data = prepared(run_config(train, evaluation_source=str(evaluation)), tokenizer_folder, tmp_path / "cache")
    assert data.evaluation_folder is not None and data.evaluation_folder != data.folder
    assert data.documents == 45 and 0 < data.evaluation_rows < data.train_rows
    with pytest.raises(InputError, match="only a dataset of the hub has splits"):
        prepared(run_config(train, evaluation_split="test"), tokenizer_folder, tmp_path / "cache")
    with pytest.raises(InputError) as caught:
        prepared(run_config(train, evaluation_source="nowhere/*.txt"), tokenizer_folder, tmp_path / "cache")
    assert "data.evaluation_source: nowhere/*.txt" in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest", "version"])
def test_a_damaged_packing_is_made_again(
    damage: str, texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    config = run_config(texts(*DOCUMENTS))
    data = prepared(config, tokenizer_folder, tmp_path / "cache")
    tokens = (data.folder / "tokens.bin").read_bytes()
    manifest = data.folder / "manifest.json"
    if damage == "cut":
        (data.folder / "tokens.bin").write_bytes(tokens[:-2])
    elif damage == "gone":
        (data.folder / "boundaries.bin").unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-20])
    else:
        manifest.write_text(manifest.read_text().replace(f'"version": {FORMAT_VERSION}', '"version": 1'))
    assert read_manifest(data.folder) is None
    again = prepared(config, tokenizer_folder, tmp_path / "cache")
    assert not again.from_cache and again.folder == data.folder
    assert (again.folder / "tokens.bin").read_bytes() == tokens
    assert len(in_process) == 2


def test_a_second_caller_waits_for_the_first(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    config, cache, told = run_config(texts(*DOCUMENTS)), tmp_path / "cache", []
    first = prepared(config, tokenizer_folder, cache)
    hidden = first.folder.rename(tmp_path / "hidden")
    waiting, results = threading.Event(), []

    def on_progress(progress: Progress) -> None:
        told.append(progress)
        if progress.stage == "wait":
            waiting.set()

    second = threading.Thread(
        target=lambda: results.append(prepared(config, tokenizer_folder, cache, progress=on_progress))
    )
    with (first.folder.parent / f".{first.folder.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        assert waiting.wait(30)
        hidden.rename(first.folder)  # what the first caller does at its end
    second.join(30)
    assert results[0].from_cache and len(in_process) == 1
    assert [progress.stage for progress in told].count("wait") == 1


def test_leftovers_of_a_killed_process_are_cleared(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    config, cache = run_config(texts(*DOCUMENTS)), tmp_path / "cache"
    data = prepared(config, tokenizer_folder, cache)
    (data.folder / "manifest.json").unlink()
    leftover = data.folder.parent / f".{data.folder.name}.partial-0badcafe"
    leftover.mkdir()
    prepared(config, tokenizer_folder, cache)
    assert not leftover.exists()


def test_text_that_changes_under_our_hands(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = texts(*DOCUMENTS)

    def meddle(job: dict[str, Any], on_progress: object = None) -> dict[str, Any]:
        path.write_text('{"text": "new"}\n')
        return {}

    monkeypatch.setattr(prepare, "run_in_child", meddle)
    with pytest.raises(InputError, match="changed while they were read"):
        prepared(run_config(path), tokenizer_folder, tmp_path / "cache")


def test_ids_beyond_the_embedding_are_found_in_the_cache_too(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    config, cache = run_config(texts(*DOCUMENTS)), tmp_path / "cache"
    data = prepared(config, tokenizer_folder, cache)
    manifest = read_manifest(data.folder)
    assert manifest is not None
    with pytest.raises(InputError) as caught:
        prepared(config, tokenizer_folder, cache, vocabulary_rows=manifest.highest_id)
    assert f"token id {manifest.highest_id} " in str(caught.value) and str(tokenizer_folder) in str(caught.value)
    assert prepared(config, tokenizer_folder, cache, vocabulary_rows=manifest.highest_id + 1).from_cache


def test_sequence_longer_than_the_positions(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, no_child: None
) -> None:
    with pytest.raises(InputError) as caught:
        prepared(run_config(texts("a"), sequence_length=513), tokenizer_folder, tmp_path, max_positions=512)
    assert "longer than the model's 512 positions" in str(caught.value) and "512 or less" in str(caught.value)
    with pytest.raises(InputError, match="nothing to predict"):
        prepared(run_config(texts("a"), sequence_length=1), tokenizer_folder, tmp_path)


def test_a_folder_without_a_tokenizer(texts: Texts, run_config: MakeConfig, tmp_path: Path, no_child: None) -> None:
    with pytest.raises(InputError, match="no tokenizer in this folder"):
        prepared(run_config(texts("a")), tmp_path / "nothing", tmp_path / "cache")


def test_a_cache_that_cannot_be_written(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, no_child: None
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(InputError, match="(?s)the cache folder cannot be written.*set COREMILL_CACHE"):
        prepared(run_config(texts("a")), tokenizer_folder, tmp_path / "cache")


def test_one_row_cannot_be_split(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    with pytest.raises(InputError, match="one row cannot be shared"):
        prepared(run_config(texts("a few words"), evaluation_fraction=0.5), tokenizer_folder, tmp_path / "cache")


def test_fewer_rows_than_ranks(
    texts: Texts, run_config: MakeConfig, tokenizer_folder: Path, tmp_path: Path, in_process: list[str]
) -> None:
    data = prepared(run_config(texts("a few words")), tokenizer_folder, tmp_path / "cache")
    assert data.train_rows == 1
    require_rows_for_ranks(data, 1)
    with pytest.raises(InputError, match="fewer rows than there are ranks: 1 rows, 2 ranks"):
        require_rows_for_ranks(data, 2)


def test_the_launcher_stays_small() -> None:
    program = (
        "import coremill.data.tokenise, coremill.data.sources, coremill.data.built_in_tokenizer, sys;"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'tokenizers', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
