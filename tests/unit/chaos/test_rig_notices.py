"""The rig can fail: a store that does things in the wrong order, or looks too little, is found out."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import bare_store, store_faults
from chaos.experiment import Rig

from coremill.checkpoint import manifest, resume
from coremill.checkpoint.store import Store


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    folder = tmp_path / "rig"
    folder.mkdir()
    return Rig(folder, 5, tmp_path / "shared")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_faults, "Shape", lambda size=0: bare_store.Shape(64 * 1024))


def test_the_store_as_it_is(rig: Rig):
    for experiment in (store_faults.killed_in_save, store_faults.altered, store_faults.scrambled_times):
        assert all(trial.passed for trial in experiment(rig, 12)), experiment.__name__
        for path in rig.folder.iterdir():
            path.rename(path.with_name(f"{experiment.__name__}-{path.name}"))


def test_a_store_that_removes_before_it_commits(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    commit = Store.commit

    def hasty(self: Store, *arguments):
        self.prune(1)
        return commit(self, *arguments)

    monkeypatch.setattr(Store, "commit", hasty)
    assert not all(trial.passed for trial in store_faults.killed_in_save(rig, 12))


def test_a_store_that_writes_under_the_final_name(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Store, "partial", lambda self, step, number: self.folder / manifest.step_folder_name(step))
    monkeypatch.setattr(Path, "rename", lambda self, target: self if self == target else self.replace(target))
    monkeypatch.setattr(Store, "_hide", lambda self, path: path)
    monkeypatch.setattr(Store, "_remove", lambda self, path: None)
    assert not all(trial.passed for trial in store_faults.killed_in_save(rig, 12))


def test_a_look_without_hashes(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resume.Checkpoint, "verify", lambda self, names=None: None)
    failed = [trial for trial in store_faults.altered(rig, 30) if not trial.passed]
    assert any(trial.fault.startswith("flip") for trial in failed)


def test_a_rename_before_the_sync(tmp_path: Path):
    folder = "/c/checkpoints"
    part = f"{folder}/.partial-step-00000003-a-1"
    files = [f'1 write(3<{part}/{name}>, ""..., 9) = 9\n1 fsync(3<{part}/{name}>) = 0' for name in store_faults.FILES]
    sync, rename = f"1 fsync(3<{part}>) = 0", f'1 rename("{part}", "{folder}/step-00000003") = 0'
    parent = f"1 fsync(4<{folder}>) = 0"
    assert store_faults._wrong_order("\n".join([*files, sync, rename, parent]), 3) is None
    assert "folder was not synced" in str(store_faults._wrong_order("\n".join([*files, rename, parent]), 3))
    assert "parent was not synced" in str(store_faults._wrong_order("\n".join([*files, sync, rename]), 3))
    late = [*files[1:], sync, rename, parent, files[0]]
    assert "was not synced after its last write" in str(store_faults._wrong_order("\n".join(late), 3))
