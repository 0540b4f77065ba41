"""How many rows an epoch has, before they are prepared: counted where that is quick, else estimated and said so."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_tokenizer import make_tokenizer

from coremill.config.schema import RunConfig
from coremill.data import counting
from coremill.data import tokenise as prepare
from coremill.data.packed import Progress
from coremill.plan.types import RowCount

LENGTH = 16


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "tokenizer")


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the process that tokenises was asked for; done here instead."""
    from coremill.data.tokenise_child import Speaker, do_job

    asked: list[str] = []

    def run(job: dict[str, Any], on_progress: Callable[[Progress], None] | None = None) -> dict[str, Any]:
        asked.append(job["job"])
        with Path(os.devnull).open("wb") as nowhere:
            return do_job(job, Speaker(nowhere))

    monkeypatch.setattr(prepare, "run_in_child", run)
    monkeypatch.setattr(counting, "run_in_child", run)
    return asked


def config_of(folder: Path, **data: Any) -> RunConfig:
    section = {"source": f"{folder}/*.jsonl", "sequence_length": LENGTH, **data}
    return RunConfig.model_validate({"data": section, "train": {"epochs": 2}})


def write_files(folder: Path, *, files: int = 5, documents: int = 40) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(files):
        texts = (f"document {index} of {file} holds words about the mill and the store" for index in range(documents))
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def count(config: RunConfig, tokenizer_folder: Path | None, cache: Path) -> RowCount:
    return counting.count_rows(
        config,
        tokenizer_folder=tokenizer_folder,
        vocabulary_rows=300,
        cache=cache,
        progress=lambda _: None,
    )


def rows_of(config: RunConfig, tokenizer_folder: Path, cache: Path) -> int:
    options: dict[str, Any] = {"vocabulary_rows": 300, "max_positions": None, "cache": cache}
    return prepare.prepare_data(config, tokenizer_folder=tokenizer_folder, **options).train_rows


@pytest.mark.parametrize("held_out", [0.0, 0.1])
def test_small_text_is_counted_and_training_finds_it_packed(
    tmp_path: Path, tokenizer_folder: Path, jobs: list[str], held_out: float
) -> None:
    config = config_of(write_files(tmp_path / "text"), evaluation_fraction=held_out)
    found = count(config, tokenizer_folder, tmp_path / "cache")
    before = list(jobs)
    assert found.rows == rows_of(config, tokenizer_folder, tmp_path / "cache") and not found.is_estimate
    assert jobs == before and "tokenise" in before


def test_of_large_text_a_sample_is_tokenised(
    tmp_path: Path, tokenizer_folder: Path, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "PACKED_NOW_BYTES", 1000)
    monkeypatch.setattr(counting, "SAMPLE_BYTES", 4000)
    config = config_of(write_files(tmp_path / "text"), evaluation_fraction=0.1)
    found = count(config, tokenizer_folder, tmp_path / "cache")
    assert jobs == ["sample"] and found.is_estimate and "bytes a token in a sample of" in found.words
    rows = rows_of(config, tokenizer_folder, tmp_path / "cache")
    assert found.rows == pytest.approx(rows, rel=0.05)
    counted = count(config, tokenizer_folder, tmp_path / "cache")  # which is packed now
    assert counted.rows == rows and not counted.is_estimate and jobs.count("sample") == 1


def test_packed_text_of_another_share_is_an_estimate(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "PACKED_NOW_BYTES", 1000)
    folder = write_files(tmp_path / "text")
    whole = rows_of(config_of(folder), tokenizer_folder, tmp_path / "cache")
    found = count(config_of(folder, evaluation_fraction=0.25), tokenizer_folder, tmp_path / "cache")
    assert found.is_estimate and found.rows == round(0.75 * whole) and "to be held out" in found.words


def test_without_a_tokenizer_bytes_are_all_there_is(tmp_path: Path, jobs: list[str]) -> None:
    folder = write_files(tmp_path / "text")
    found = count(config_of(folder), None, tmp_path / "cache")
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert found.is_estimate and found.rows == int(size / 4 / LENGTH) and "assumed" in found.words and not jobs


def test_compressed_text_and_several_sources(
    tmp_path: Path, tokenizer_folder: Path, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "PACKED_NOW_BYTES", 20_000)
    monkeypatch.setattr(counting, "SAMPLE_BYTES", 4000)
    small, large = write_files(tmp_path / "small", files=1), tmp_path / "large"
    large.mkdir()
    words = ["mill", "store", "document", "water", "wheel", "stone"]
    draw = random.Random(7)
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=60))}) + "\n" for _ in range(8000)]
    (large / "all.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    sources = [{"source": f"{small}/*.jsonl"}, {"source": str(large / "all.jsonl.gz")}]
    config = RunConfig.model_validate({"data": {"sources": sources, "sequence_length": LENGTH}, "train": {"epochs": 1}})
    found = count(config, tokenizer_folder, tmp_path / "cache")
    assert found.is_estimate and str(large) in found.words and jobs == ["tokenise", "sample"]
    assert found.rows == pytest.approx(rows_of(config, tokenizer_folder, tmp_path / "cache"), rel=0.1)
