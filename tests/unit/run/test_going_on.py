"""What a run folder means to the command that is given for it again: finished, or to go on, and from where."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from coremill.checkpoint.changed_settings import describe_changes
from coremill.checkpoint.continuation import checkpoint_folder
from coremill.config.load import LoadedConfig, load_config
from coremill.config.show import show
from coremill.errors import InputError
from coremill.hosts.ssh import Host
from coremill.launch.node_command import node_commands
from coremill.launch.request import Request
from coremill.model.lora_base import Base, digest_of_model
from coremill.model.source import ModelFolder
from coremill.run import story
from coremill.run.export_command import Wanted
from coremill.run.folder import RunFolder
from coremill.run.opening import Options, already_finished, with_folders_settled
from coremill.run.prepare import Orders
from coremill.world.identity import HEAD, NodeIdentity
from coremill.world.stop import ask_to_stop, was_asked_to_stop
from unit.checkpoint.small_checkpoints import make_store, save

RUN_FILE = """\
model: models/tiny
data: {source: text.txt, evaluation_fraction: 0.1}
train: {steps: 100}
checkpoint: {every: never}
evaluation: {every_steps: 5, stop_after: 2}
"""


def loaded_in(folder: Path, *settings: str) -> LoadedConfig:
    (folder / "run.yaml").write_text(RUN_FILE)
    return load_config(folder / "run.yaml", [f"run.folder={folder / 'run'}", *settings])


def finished_run(loaded: LoadedConfig, **report: object) -> RunFolder:
    folder = RunFolder(Path(loaded.config.run.folder or ""))
    folder.path.mkdir()
    folder.config.write_text(show(loaded))
    folder.report.write_text(json.dumps({"state": "finished", **report}))
    return folder


def test_an_early_end_without_a_checkpoint_is_an_end(tmp_path: Path) -> None:
    loaded = loaded_in(tmp_path)
    folder = finished_run(loaded, early_stop={"step": 15, "text": "none was better"})
    console = Console(record=True, width=400)
    assert already_finished(loaded.config, folder, Options(), console)
    assert "holds this run, finished" in console.export_text()


def test_going_on_from_the_end_is_nothing_to_do_unless_something_is_asked_for(tmp_path: Path) -> None:
    loaded = loaded_in(tmp_path, "evaluation.stop_after=null", "train.steps=9")
    folder = finished_run(loaded, steps=9, early_stop=None)
    folder.export.mkdir()
    store = make_store(folder.path)
    for step in (4, 9):
        save(store, step, config=loaded.config.model_dump(mode="json"))
    again = loaded_in(tmp_path, "evaluation.stop_after=null", "train.steps=9", "evaluation.rows=2")
    longer = loaded_in(tmp_path, "evaluation.stop_after=null", "train.steps=10")

    def is_over(asked: LoadedConfig, step: str) -> tuple[bool, str]:
        console = Console(record=True, width=400)
        return already_finished(asked.config, folder, Options(start_from=step), console), console.export_text()

    done, said = is_over(loaded, "9")
    assert done and "holds this run, finished" in said and "going on" not in said
    for asked, step in ((loaded, "4"), (again, "9"), (longer, "9")):
        done, said = is_over(asked, step)
        assert not done and f"going on from step {step}" in said
    folder.export.rmdir()
    assert not is_over(loaded, "9")[0]  # the export is made again


@pytest.mark.parametrize("early", [None, {"step": 9, "text": "none was better"}])
def test_a_finished_run_whose_end_was_not_saved_is_not_trained_again(tmp_path: Path, early: object) -> None:
    """`checkpoint.every: never`, stopped once at step 4, which saves: that checkpoint is the newest for good."""
    loaded = loaded_in(tmp_path, "train.steps=9")
    folder = finished_run(loaded, steps=9, early_stop=early)
    save(make_store(folder.path), 4, config=loaded.config.model_dump(mode="json"))
    console = Console(record=True, width=400)
    assert already_finished(loaded.config, folder, Options(), console)
    assert "holds this run, finished" in console.export_text()
    if early is None:
        other = loaded_in(tmp_path, "train.steps=9", "evaluation.rows=2")
        assert already_finished(other.config, folder, Options(), console)
    longer = loaded_in(tmp_path, "train.steps=12")
    assert not already_finished(longer.config, folder, Options(), console)
    assert "continuing from step 4" in console.export_text()


def test_more_steps_where_no_checkpoint_is_left_are_refused(tmp_path: Path) -> None:
    folder = finished_run(loaded_in(tmp_path), steps=100, early_stop=None)
    longer = loaded_in(tmp_path, "train.steps=200")
    with pytest.raises(InputError, match="holds this run, finished") as refused:
        already_finished(longer.config, folder, Options(), Console())
    assert "no checkpoint is left to go on from" in str(refused.value.why)
    assert already_finished(loaded_in(tmp_path, "train.steps=50").config, folder, Options(), Console())


def test_another_host_may_have_written_its_config_first(tmp_path: Path) -> None:
    folder = finished_run(loaded_in(tmp_path, "evaluation.stop_after=null"), steps=100, early_stop=None)
    longer = loaded_in(tmp_path, "evaluation.stop_after=null", "train.steps=200")
    save(make_store(folder.path), 100, config=loaded_in(tmp_path).config.model_dump(mode="json"))
    folder.config.write_text(show(longer))
    assert not already_finished(longer.config, folder, Options(), Console(), nodes=2)


def test_fewer_epochs_are_none_more(tmp_path: Path) -> None:
    def of_epochs(epochs: int) -> LoadedConfig:
        return loaded_in(tmp_path, "train.steps=null", f"train.epochs={epochs}")

    folder = finished_run(of_epochs(3), steps=30, early_stop=None)
    assert already_finished(of_epochs(1).config, folder, Options(), Console())
    with pytest.raises(InputError, match="holds this run, finished"):
        already_finished(of_epochs(5).config, folder, Options(), Console())


def test_the_folder_of_checkpoints_is_the_same_wherever_the_config_of_a_run_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    loaded = loaded_in(tmp_path, "checkpoint.folder=saved")
    folder = finished_run(with_folders_settled(loaded, RunFolder(tmp_path / "run")))
    monkeypatch.chdir(tmp_path / "second")
    written = load_config(folder.config).config
    assert checkpoint_folder(written, folder.path) == tmp_path / "first" / "saved"
    earlier = written.model_dump(mode="json")
    assert describe_changes(earlier, loaded.config, done=5, steps_before=100, steps=100) == []
    console = Console(record=True, width=400)
    assert already_finished(loaded.config, folder, Options(), console)
    assert "changed" not in console.export_text()
    assert with_folders_settled(loaded_in(tmp_path), folder).config.checkpoint.folder is None


def test_a_finished_run_says_that_the_model_beside_its_adapters_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that it cannot be told, where orders are gone, is no error."""
    file = tmp_path / "model.safetensors"
    save_file({"w": np.ones(5, np.float32)}, file)
    model = ModelFolder(tmp_path, {}, "pretrained", "m", "AutoModelForCausalLM")
    loaded = loaded_in(tmp_path)
    folder = finished_run(loaded)

    def said() -> str:
        console = Console(record=True, width=400)
        assert already_finished(loaded.config, folder, Options(), console)
        return console.export_text()

    assert "have changed" not in said()
    orders = SimpleNamespace(base=Base("/models/m", None, digest_of_model(model)), model=model)
    monkeypatch.setattr(Orders, "read", lambda path: orders)
    assert "have changed" not in said()
    save_file({"w": np.zeros(5, np.float32)}, file)
    assert "holds this run, finished" in said() and "warning: the files of /models/m have changed since" in said()


def test_an_export_is_of_one_form() -> None:
    with pytest.raises(InputError, match="--merged and --adapter are both given") as refused:
        Wanted(step=None, dtype=None, push=None, private=False, merged=True, adapter=True)
    assert refused.value.exit_code == 78


@pytest.mark.parametrize(("is_first", "is_kept"), [(None, False), (True, False), (False, True)])
def test_a_request_to_stop_outlives_the_launcher_of_the_first_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool | None, is_kept: bool
) -> None:
    """Made while `train --hostfile` waits for that host: the launcher that follows is of the run that was asked."""

    def refuse(*_: object, **__: object) -> None:
        raise InputError("no such data")

    monkeypatch.setattr(story, "prepare_run", refuse)
    if is_first is not None:
        hosts = tuple(Host(name=name, ranks=1, is_here=name == "a") for name in "ab")
        first, _ = node_commands(Request(script="run/story.py"), hosts, 1234, {}, is_first=is_first)
        monkeypatch.setenv(HEAD, first.environ[HEAD])
    ask_to_stop(tmp_path)
    node = NodeIdentity(node_rank=0, nodes=2, ranks_per_node=1, master_address="127.0.0.1", master_port=1234)
    with pytest.raises(InputError, match="no such data"):
        story.run_as_launcher(load_config(None, [f"run.folder={tmp_path}"]), Options(), node, Console(quiet=True))
    assert was_asked_to_stop(tmp_path) == is_kept
