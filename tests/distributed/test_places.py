"""Hosts that share no disk: each rank is a host here and sees the disk it is given. They save, die and go on as one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import ranks
from coremill.checkpoint.manifest import survey
from coremill.checkpoint.resume import find_resume_point
from coremill.checkpoint.store import GO_ON_FROM, Store
from coremill.errors import StorageError
from saved_training import Events, disk_of, pretend_hosts, train_saved
from tiny_models import make_model
from training import make_packed

STEPS = 16


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("places")
    make_model(folder / "llama", "llama")
    data = make_packed(folder / "data", rows=128, length=16, vocabulary=90)
    return {"model_folder": str(folder / "llama"), "data": data.to_json()}


@pytest.fixture(scope="module")
def reference(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """On one disk, never stopped."""
    result: dict[str, Any] = run(inputs, 2, tmp_path_factory.mktemp("reference"), every="never")[0]
    return result


@pytest.fixture(scope="module")
def stopped(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two disks with their parts of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("stopped")
    run(inputs, 2, folder, disks=[0, 1], stop_at=6)
    return folder


def run(inputs: dict[str, Any], world_size: int, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    return ranks.run_ranks(train_saved, world_size, folder=str(folder), **{"engine": "shard", **inputs, **settings})


def told(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in result["events"] if event["kind"] == kind]


def steps_on(folder: Path, disk: int) -> list[int]:
    checkpoints = folder / f"disk-{disk}" / "checkpoints"
    assert not list(checkpoints.glob(".*"))
    return [each.step for each in survey(checkpoints).sound]


def look(world: Any, *, folder: str, disks: list[int]) -> dict[str, Any]:
    """Only find out where the run would go on; every rank needs every file."""
    pretend_hosts(world, disks)
    events = Events()
    try:
        origin = find_resume_point(disk_of(folder, disks, world.rank) / "checkpoints", world, events)
    except StorageError as error:
        return {"step": None, "error": str(error), "events": events.said, "exit_code": error.exit_code}
    if origin.checkpoint is not None:
        for file in origin.checkpoint.manifest.files:
            assert (origin.checkpoint.folder / file.name).stat().st_size == file.bytes
    world.barrier()
    origin.remove_fetched()
    return {"step": origin.step, "events": events.said}


def looked(folder: Path, disks: list[int]) -> list[dict[str, Any]]:
    return ranks.run_ranks(look, len(disks), folder=str(folder), disks=disks)


def copied(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "copy")
    return tmp_path / "copy"


def test_killed_between_the_renames_of_two_hosts_the_step_before_is_taken_with_the_same_bits(
    inputs, reference, tmp_path
):
    with pytest.raises(ranks.RankError) as caught:
        run(inputs, 2, tmp_path, disks=[0, 1], die_in_commit_at=8)
    assert caught.value.kind == "died"
    again = run(inputs, 2, tmp_path, disks=[0, 1])
    for result in again:
        (choice,) = [event for event in told(result, "choice") if event["name"] == "checkpoints"]
        assert (choice["value"], choice["reason"]) == ("per host", "host-1 does not see host-0's folder")
        (passed,) = told(result, "passed_over")
        missing = "rank-00001-of-00002.safetensors is missing (host-1 wrote it)"
        assert passed["text"] == f"checkpoint step-00000008 passed over: {missing}"
        assert result["first_step"] == 5 and not result["fetched"], "each has its own rows"
        assert [event["step"] for event in told(result, "save") if event["saved"]] == [8, 12, 16]
    assert again[0]["losses"] == {step: reference["losses"][step] for step in range(5, STEPS + 1)}
    assert steps_on(tmp_path, 0) == steps_on(tmp_path, 1) == [16, 12]
    manifests = [disk_of(str(tmp_path), [0, 1], rank) / "checkpoints/step-00000016/manifest.json" for rank in (0, 1)]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
    assert [len(list(path.parent.glob("rank-*"))) for path in manifests] == [1, 1]


def test_a_host_that_cannot_rename_fails_the_save_on_all(inputs, reference, tmp_path):
    for result in run(inputs, 2, tmp_path, disks=[0, 1], no_commit_at=8):
        saves = {event["step"]: event for event in told(result, "save")}
        assert {step: event["saved"] for step, event in saves.items()} == {4: True, 8: False, 12: True, 16: True}
        assert saves[8]["reason"].startswith("host-1: Read-only file system")
        assert result["losses"] == reference["losses"]
    assert steps_on(tmp_path, 0) == steps_on(tmp_path, 1) == [16, 12]


def test_a_host_whose_rename_hangs_is_given_up_and_the_others_take_theirs_back(inputs, reference, tmp_path):
    for result in run(inputs, 2, tmp_path, disks=[0, 1], hang_in_commit_at=8, deadline="3s", deadline_from=8):
        saves = {event["step"]: event for event in told(result, "save")}
        assert saves[4]["saved"]
        assert saves[8]["reason"] == "the storage did not take it within 3 s (supervise.save_deadline)"
        assert not saves[16]["saved"] and result["losses"] == reference["losses"]
    assert steps_on(tmp_path, 0) == [4]


def test_swapped_hosts_other_ranks_and_mixed_places_go_on(inputs, reference, stopped, tmp_path):
    """Two hosts swap their disks and fetch from each other; then three, of which two share; both engines."""
    folder, losses = copied(stopped, tmp_path), {}
    for settings, fetched in (
        ({"disks": [1, 0], "stop_at": 9}, [True, True]),
        ({"disks": [0, 0, 1], "stop_at": 11, "engine": "replicate"}, [True, True, True]),
        ({"disks": [0, 1]}, [False, True]),  # the first half of the rows lies on the first disk
    ):
        results = run(inputs, len(fetched), folder, **settings)
        assert {result["first_step"] for result in results} == {max(losses, default=6) + 1}
        assert [result["fetched"] for result in results] == fetched
        losses |= results[0]["losses"]
        assert steps_on(folder, 0) == steps_on(folder, 1)
    assert losses == pytest.approx({step: reference["losses"][step] for step in range(7, STEPS + 1)}, rel=1e-5)


def test_mixed_places_are_told(stopped):
    (choice,) = [event for event in told(looked(stopped, [0, 0, 1])[0], "choice")]
    assert choice["value"] == "in 2 places"
    assert choice["reason"].endswith("host-0, host-1 see one; host-2 sees one")


def test_a_lost_disk_ends_the_run_with_its_name_until_fresh(stopped, tmp_path):
    folder = copied(stopped, tmp_path)
    shutil.rmtree(folder / "disk-1")
    for result in looked(folder, [0, 1]):
        assert result["exit_code"] == 74
        assert "step-00000006 passed over: rank-00001-of-00002.safetensors is missing (host-1" in result["error"]
        assert "--fresh" in result["error"]
    assert looked(folder, [0])[0]["exit_code"] == 74  # fewer hosts know it from the manifest
    Store(folder / "disk-0" / "checkpoints", "cleared").clear()
    assert [result["step"] for result in looked(folder, [0, 1])] == [0, 0]


def test_fresh_clears_the_disks_of_all_hosts_once(stopped, tmp_path):
    folder = copied(stopped, tmp_path)
    Store(folder / "disk-0" / "checkpoints", "cleared").clear()
    assert [result["step"] for result in looked(folder, [0, 1])] == [0, 0]
    assert steps_on(folder, 0) == steps_on(folder, 1) == []


def test_what_a_fresh_disk_lacks_comes_from_the_others(stopped, tmp_path):
    folder = copied(stopped, tmp_path)
    shutil.copytree(folder / "disk-1", folder / "disk-0", dirs_exist_ok=True)
    shutil.rmtree(folder / "disk-1")
    assert [result["step"] for result in looked(folder, [0, 1])] == [6, 6]
    assert steps_on(folder, 0) == [6, 4] and steps_on(folder, 1) == []


def test_a_file_altered_on_one_host_takes_all_to_the_step_before_or_to_a_good_copy(stopped, tmp_path):
    folder = copied(stopped, tmp_path)
    newest = [folder / f"disk-{disk}" / "checkpoints/step-00000006" for disk in (0, 1)]
    path = newest[1] / "rank-00001-of-00002.safetensors"
    shutil.copy(path, folder / "good")
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    for result in looked(folder, [0, 1]):
        assert result["step"] == 4
        (passed,) = told(result, "passed_over")
        assert passed["reason"] == "rank-00001-of-00002.safetensors was altered: its hash is not the manifest's"
    (folder / "good").rename(newest[0] / path.name)
    (newest[1] / "state.json").write_text("{}")
    assert [result["step"] for result in looked(folder, [0, 1])] == [6, 6]


def go_on_from(folder: Path, step: int, disk: int = 0) -> None:
    """As the launcher of the first host leaves it."""
    (folder / f"disk-{disk}" / "checkpoints" / GO_ON_FROM).write_text(
        json.dumps({"step": step, "aside": "set-aside-now"})
    )


def test_the_step_that_was_named_is_taken_and_every_host_sets_later_ones_aside(stopped, tmp_path):
    folder = copied(stopped, tmp_path)
    go_on_from(folder, 4)
    assert [each["step"] for each in looked(folder, [0, 1])] == [4, 4]
    for disk in (0, 1):
        assert steps_on(folder, disk) == [4]  # and no mark is left
        aside = folder / f"disk-{disk}" / "checkpoints" / "set-aside-now"
        assert [path.name for path in aside.iterdir()] == ["step-00000006"]
    assert [each["step"] for each in looked(folder, [0, 1])] == [4, 4]


def test_a_named_step_of_which_a_host_lost_its_part_is_refused(stopped, tmp_path):
    folder = copied(stopped, tmp_path)
    shutil.rmtree(folder / "disk-1" / "checkpoints" / "step-00000004")
    go_on_from(folder, 4)
    with pytest.raises(ranks.RankError, match="step 4, which --from named, cannot be used"):
        looked(folder, [0, 1])
    for disk in (0, 1):
        assert (folder / f"disk-{disk}" / "checkpoints" / "step-00000006").is_dir()  # nothing was moved


def test_a_step_that_was_named_on_another_host_long_ago_is_not_taken(stopped, tmp_path):
    folder = copied(stopped, tmp_path)
    go_on_from(folder, 4, disk=1)
    assert [each["step"] for each in looked(folder, [0, 1])] == [6, 6]
    assert [steps_on(folder, disk) for disk in (0, 1)] == [[6, 4], [6, 4]]  # and no mark is left


def export_the_best(world: Any, *, folder: str, disks: list[int], model_folder: str, to: str, done: int) -> str | None:
    """What the end of a run does, where step 4 was better than the weights as they are."""
    import torch

    from coremill.checkpoint import export_best
    from coremill.checkpoint.snapshot import Training
    from coremill.config.schema import EvaluationSection
    from coremill.model.source import ModelFolder
    from coremill.plan.config_file import read_config
    from coremill.train.scores import Scores

    pretend_hosts(world, disks)
    origin = find_resume_point(disk_of(folder, disks, world.rank) / "checkpoints", world, Events())
    scores = Scores(settings=EvaluationSection(every_steps=2, keep_best="loss"), steps=STEPS)
    for step, loss in ((2, 0.5), (4, 1.0), (6, 2.0), (8, 3.0)):  # of step 2 there is no checkpoint any more
        scores.add(step, {"loss": loss})
    training: Any = Training(None, None, None, None, scores)  # type: ignore[arg-type]
    source = ModelFolder(
        Path(model_folder), read_config(Path(model_folder)), "pretrained", "a model", "AutoModelForCausalLM"
    )
    _, reason = export_best.export_chosen(
        training, origin, done, source, None, Path(to), world=world, dtype=torch.float32, events=Events()
    )
    origin.remove_fetched()
    return reason


def test_the_best_step_is_exported_from_the_parts_of_all_hosts(inputs, stopped, tmp_path):
    folder, made = copied(stopped, tmp_path), tmp_path / "export"
    settings = {
        "folder": str(folder),
        "disks": [0, 1],
        "model_folder": inputs["model_folder"],
        "to": str(made),
        "done": 8,
    }
    assert ranks.run_ranks(export_the_best, 2, **settings) == ["the best that is kept (loss 1)"] * 2
    written = load_file(made / "model.safetensors")
    files = [next((folder / f"disk-{disk}" / "checkpoints" / "step-00000004").glob("rank-*")) for disk in (0, 1)]
    parts = [load_file(file) for file in files]
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
        saved = b"".join(part[f"parameters/{name}"].tobytes() for part in parts)
        assert saved == written[name].tobytes(), name
    assert [steps_on(folder, disk) for disk in (0, 1)] == [[6, 4], [6, 4]]  # what was fetched is gone
