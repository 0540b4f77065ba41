"""One cache and one tiny model for all tests here; a folder of its own for each module."""

from __future__ import annotations

from pathlib import Path

import pytest

from end_to_end.scene import RUN_FILE, Scene, make_cache, write_text
from tiny_models import make_model, make_tokenizer


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_model(tmp_path_factory.mktemp("model") / "tiny", "llama"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, cache: Path, tiny_model: Path) -> Scene:
    """A folder with run.yaml, the model and text."""
    folder = tmp_path_factory.mktemp("scene")
    (folder / "model").symlink_to(tiny_model)
    write_text(folder / "text")
    (folder / "run.yaml").write_text(RUN_FILE)
    return Scene(folder, cache)
