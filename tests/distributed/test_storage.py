"""Real ranks on bad storage: full, gone, not shared. Training goes on, every rank is told, none counts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ranks
from coremill.checkpoint.manifest import survey
from coremill.checkpoint.resume import find_origin
from coremill.errors import InputError
from saved_training import Events, train_saved
from tiny_models import make_model
from training import make_packed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("storage")
    make_model(folder / "llama", "llama")
    data = make_packed(folder / "data", rows=128, length=16, vocabulary=90)
    inputs = {"model_folder": str(folder / "llama"), "data": data.to_json()}
    reference = ranks.run_ranks(train_saved, 2, folder=str(folder / "reference"), every="never", **inputs)
    return {**inputs, "digest": reference[0]["digest"]}


def run(inputs: dict[str, Any], folder: Path, **settings: Any) -> list[dict[str, Any]]:
    given = {name: inputs[name] for name in ("model_folder", "data")}
    return ranks.run_ranks(train_saved, 2, folder=str(folder), **given, **settings)


def saves(result: dict[str, Any]) -> dict[int, str]:
    """By step: saved, or why not."""
    told = [event for event in result["events"] if event["kind"] == "save"]
    assert len({event["step"] for event in told}) == len(told), "told twice"
    return {event["step"]: "saved" if event["saved"] else event["reason"] for event in told}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, with room for a few checkpoints."""
    (tmp_path / "checkpoints").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=755", "tmpfs", str(tmp_path / "checkpoints")]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path / "checkpoints")], check=True)


def test_a_full_disk_ends_nothing_and_saves_go_on_when_there_is_room(inputs, small_disk):
    results = run(inputs, small_disk, storage={5: "fill", 9: "free"})
    for result in results:
        told = saves(result)
        assert [told[step] for step in (4, 12, 16)] == ["saved"] * 3
        assert result["ended"] == "done" and result["digest"] == inputs["digest"]
    assert "the disk is too full" in saves(results[0])[8] and "bytes needed, 0 free" in saves(results[0])[8]
    assert "the disk is too full" in saves(results[1])[8]
    assert [each.step for each in survey(small_disk / "checkpoints").sound] == [16, 12]
    assert not list((small_disk / "checkpoints").glob(".*"))


def test_a_folder_that_goes_away_ends_nothing(inputs, tmp_path):
    for result in run(inputs, tmp_path, storage={6: "hide", 9: "show"}):
        told = saves(result)
        assert told[8] != "saved" and [told[step] for step in (4, 12, 16)] == ["saved"] * 3
        assert result["ended"] == "done" and result["digest"] == inputs["digest"]


def other_host(folder: Path, rank: int) -> Any:
    """A world of two hosts whose second one does not see the folder."""
    return SimpleNamespace(
        rank=rank,
        size=2,
        nodes=2,
        hostnames=("one", "two"),
        broadcast=lambda value: json.loads(json.dumps(value)),
        gather=lambda value: [value, False],
        barrier=lambda: None,
    )


def test_hosts_that_share_no_folder_are_refused_before_the_first_step(tmp_path):
    with pytest.raises(InputError) as caught:
        find_origin(tmp_path / "checkpoints", other_host(tmp_path, 0), Events())
    text = str(caught.value)
    assert caught.value.exit_code == 78 and "is not shared by all hosts: two cannot see it" in text
    assert "checkpoint.every=never" in text
    origin = find_origin(tmp_path / "checkpoints", other_host(tmp_path, 0), Events(), saving=False)
    assert origin.checkpoint is None and "not shared" in (origin.unsaved_because or "")


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    alone = SimpleNamespace(rank=0, size=1, nodes=1, hostnames=("one",), broadcast=lambda value: value)
    with pytest.raises(InputError, match="nothing could be saved"):
        find_origin(tmp_path / "checkpoints", alone, Events())
