"""Whatever was changed in a checkpoint is found before a byte of it is used, and named."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_checkpoints import make_store, save

from coremill.checkpoint.manifest import Checkpoint, Unusable, open_checkpoint, refuse_writable_by_others, survey
from coremill.errors import InputError

FILES = ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors", "state.json", "manifest.json")


def why_not(folder: Path) -> str:
    """Why this checkpoint is not used; an empty text if it would be."""
    try:
        open_checkpoint(folder).verify()
    except Unusable as error:
        return str(error)
    return ""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Checkpoint, Checkpoint]:
    """Two whole checkpoints with files of equal names and sizes."""
    store = make_store(tmp_path)
    return save(store, 11), save(store, 12)


def flip(path: Path, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_bit_is_found(pair, file):
    folder = pair[1].folder
    path, whole = folder / file, (folder / file).read_bytes()
    generator = random.Random(file)
    for _ in range(60):
        flip(path, generator)
        assert file in why_not(folder)
        path.write_bytes(whole)
    assert why_not(folder) == ""


@pytest.mark.parametrize("file", FILES)
def test_any_cut_is_found(pair, file):
    folder = pair[1].folder
    size = (folder / file).stat().st_size
    for left in (size - 1, size // 2, 8, 0):
        os.truncate(folder / file, left)
        assert file in why_not(folder)


@pytest.mark.parametrize("file", FILES)
def test_any_missing_file_is_found(pair, file):
    (pair[1].folder / file).unlink()
    assert f"{file} is missing" in why_not(pair[1].folder)


def test_swapped_files_are_found(pair):
    folder = pair[1].folder
    one, other, aside = folder / FILES[0], folder / FILES[1], folder / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    assert f"{FILES[0]} was altered" in why_not(folder)


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_step_is_found(pair, file):
    older, newer = pair
    shutil.copy(older.folder / file, newer.folder / file)
    assert ("of step 11" if file == "manifest.json" else file) in why_not(newer.folder)


def test_a_checkpoint_under_another_name_is_found(pair):
    folder = pair[1].folder.rename(pair[1].folder.with_name("step-00000099"))
    assert "of step 12" in why_not(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document.update(step=12, world_size=3),
        lambda document: document["files"][0].update(sha256="0" * 64),
        lambda document: document["files"].pop(),
        lambda document: document.update(attempt="other"),
        lambda document: document.pop("sha256"),
    ],
)
def test_an_edited_manifest_is_found(pair, edit: Callable[[dict], None]):
    path = pair[1].folder / "manifest.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    assert "manifest.json was altered" in why_not(pair[1].folder)


def test_a_link_in_place_of_a_file_is_found(pair):
    path = pair[1].folder / FILES[0]
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    assert f"{FILES[0]} is not a plain file" in why_not(pair[1].folder)


def test_the_one_before_is_taken_and_the_reason_is_said(pair):
    os.truncate(pair[1].folder / FILES[0], 3)
    found = survey(pair[1].folder.parent)
    assert [each.step for each in found.sound] == [11]
    (passed,) = found.passed_over
    assert str(passed).startswith("checkpoint step-00000012 passed over: rank-00000-of-00002.safetensors has 3 bytes")


def test_the_newest_is_the_highest_step_whatever_the_clock_says(pair):
    os.utime(pair[0].folder, (4e9, 4e9))
    assert [each.step for each in survey(pair[0].folder.parent).sound] == [12, 11]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_folders_that_others_may_write_are_refused(pair, mode):
    parent = pair[0].folder.parent
    pair[1].folder.chmod(mode)
    assert "other users may write" in why_not(pair[1].folder)
    refuse_writable_by_others(parent, "checkpoint.folder")
    parent.chmod(mode)
    with pytest.raises(InputError, match="not safe to read from") as caught:
        refuse_writable_by_others(parent, "checkpoint.folder")
    assert caught.value.exit_code == 78 and "chmod go-w" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folders_of_others_are_refused(pair):
    os.chown(pair[1].folder, 12345, 12345)
    assert "belongs to another user (uid 12345)" in why_not(pair[1].folder)
