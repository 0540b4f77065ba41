from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_tokenizer import make_tokenizer

from coremill.config.schema import RunConfig


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., Path]:
    """Writes a .jsonl file of documents."""

    def write(*documents: str, name: str = "texts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        return path

    return write


@pytest.fixture
def run_config() -> Callable[..., RunConfig]:
    def make(source: object, *, seed: int = 7, **data: object) -> RunConfig:
        section = {"source": str(source), "sequence_length": 8, **data}
        return RunConfig.model_validate({"data": section, "train": {"seed": seed}})

    return make
