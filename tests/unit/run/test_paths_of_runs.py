"""Relative paths of a run that goes on mean what they meant when it began, whatever folder is the current one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coremill import hub
from coremill.checkpoint.continuation import checkpoint_folder
from coremill.config.load import LoadedConfig, load_config
from coremill.config.places import places_to_record
from coremill.data.tokenise import check_sources
from coremill.errors import InputError
from coremill.model.source import _write_config
from coremill.run.folder import RunFolder
from coremill.run.opening import with_paths_of_run

RUN_FILE = "model: models/tiny\ndata: {source: texts/*.txt}\ntrain: {steps: 1}\n"


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that was started in `first`, by the run file `configs/run.yaml` there."""
    for name in ("first/configs", "first/models/tiny", "first/texts", "second/texts", "run"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "first/configs/run.yaml").write_text(RUN_FILE)
    (tmp_path / "first/texts/a.txt").write_text("the text of the run")
    monkeypatch.chdir(tmp_path / "first")
    folder, loaded = RunFolder(tmp_path / "run"), load_config(Path("configs/run.yaml"))
    folder.orders.write_text(json.dumps({"paths": places_to_record(loaded.config, loaded.places)}))
    return folder


def source_of(loaded: LoadedConfig) -> str:
    check_sources(loaded.located.data, max_positions=None)
    return loaded.located.data.source


def test_the_same_data_from_another_folder(begun: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = tmp_path / "first/configs/run.yaml"
    monkeypatch.chdir(tmp_path / "second")
    with pytest.raises(InputError, match="no file matches"):
        source_of(load_config(run_file))
    found = with_paths_of_run(load_config(run_file), begun)
    assert source_of(found) == f"{tmp_path}/first/texts/*.txt"
    assert found.located.model.name == f"{tmp_path}/first/models/tiny"
    assert found.config.data.source == "texts/*.txt"  # as written: what a continuation compares
    assert found.places.notes[-1] == (
        f"note: data.source: texts/*.txt is taken where this run has it from, {tmp_path}/first/texts/*.txt"
    )


def test_other_text_in_the_current_folder_is_not_taken(
    begun: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "second/texts/b.txt").write_text("other text")
    monkeypatch.chdir(tmp_path / "second")
    loaded = load_config(tmp_path / "first/configs/run.yaml")
    assert source_of(loaded) == "texts/*.txt"  # of a new run
    assert source_of(with_paths_of_run(loaded, begun)) == f"{tmp_path}/first/texts/*.txt"


def test_in_its_own_folder_nothing_is_said(begun: RunFolder) -> None:
    assert with_paths_of_run(load_config(Path("configs/run.yaml")), begun).places.notes == ()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"paths": 3}', '{"paths": {"data.source": 3}}'])
def test_orders_of_an_older_release_say_nothing(begun: RunFolder, text: str) -> None:
    begun.orders.write_text(text)
    assert source_of(with_paths_of_run(load_config(Path("configs/run.yaml")), begun)) == "texts/*.txt"


def test_another_path_is_another_path(begun: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "second/texts/b.txt").write_text("other text")
    monkeypatch.chdir(tmp_path / "second")
    loaded = load_config(tmp_path / "first/configs/run.yaml", ["data.source=texts/b.txt"])
    assert source_of(with_paths_of_run(loaded, begun)) == "texts/b.txt"


def test_checkpoints_stay_where_the_run_has_them(
    begun: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file, settings = tmp_path / "first/configs/run.yaml", ["checkpoint.folder=saved"]
    loaded = load_config(run_file, settings)
    begun.orders.write_text(json.dumps({"paths": places_to_record(loaded.config, loaded.places)}))
    assert with_paths_of_run(loaded, begun).config == loaded.config
    monkeypatch.chdir(tmp_path / "second")
    for _ in range(2):  # a continuation writes down what the run began with
        found = with_paths_of_run(load_config(run_file, settings), begun)
        assert checkpoint_folder(found.config, begun.path) == tmp_path / "first" / "saved"
        assert f"note: checkpoint.folder: saved is where this run has it, {tmp_path}/first/saved" in found.places.notes
        begun.orders.write_text(json.dumps({"paths": places_to_record(found.config, found.places)}))
    other = with_paths_of_run(load_config(run_file, ["checkpoint.folder=elsewhere"]), begun)
    assert other.config.checkpoint.folder == "elsewhere"
    assert with_paths_of_run(load_config(run_file), begun).config.checkpoint.folder is None


def test_a_cache_that_cannot_be_written_names_its_variable(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(InputError, match="set COREMILL_CACHE to a folder"):
        _write_config({"model_type": "llama"}, tmp_path / "cache", "config")


@pytest.mark.parametrize("kind", ["model", "dataset"])
@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/hub"), OSError(28, "No space left", "/hub")]
)
def test_the_cache_of_the_hub_names_its_variable(kind: hub.Kind, error: OSError) -> None:
    problem = hub.explain(error, kind, "some/name", None, kind)
    assert problem is not None
    assert "cache on this machine cannot be written" in problem.what
    assert "/hub" in (problem.why or "") and "set HF_HOME" in (problem.do or "")
