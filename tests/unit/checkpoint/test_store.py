"""A checkpoint is whole or not there: format, kills at every moment of a save, full disks, what is kept."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_checkpoints import ROWS, make_store, save, weights

from coremill.checkpoint import store as store_module
from coremill.checkpoint.manifest import survey
from coremill.checkpoint.store import SYNC_BYTES, NotSaved, Store, StoredTensor, sync_bytes_among


def test_the_files_are_safetensors_that_any_reader_opens(tmp_path):
    checkpoint = save(make_store(tmp_path), 7)
    parts = [load_file(checkpoint.folder / f"rank-0000{rank}-of-00002.safetensors")["parameters/w"] for rank in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(parts), weights(7))
    checkpoint.verify()
    assert checkpoint.state()["loader"]["position"] == 56


def test_every_write_is_synced_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    log: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("write", "fsync", "close")}
    rename = Path.rename

    def name_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}").replace(str(tmp_path), "")

    for name in ("write", "fsync"):

        def spy(descriptor: int, *rest: object, _name: str = name) -> object:
            log.append((_name, name_of(descriptor)))
            return real[_name](descriptor, *rest)

        monkeypatch.setattr(os, name, spy)

    def spy_rename(path: Path, target: Path) -> Path:
        log.append(("rename", str(target).replace(str(tmp_path), "")))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", spy_rename)
    save(make_store(tmp_path), 3)

    committed = log.index(("rename", "/checkpoints/step-00000003"))
    files = {name for kind, name in log if kind == "write"}
    assert len(files) == 4
    for name in files:
        kinds = [kind for kind, other in log[:committed] if other == name]
        assert kinds[-1] == "fsync" and kinds.count("fsync") == 1
    assert log[committed - 1][0] == "fsync" and log[committed - 1][1].startswith("/checkpoints/.partial-")
    assert log[committed + 1] == ("fsync", "/checkpoints")


def test_large_files_go_to_the_disk_while_they_are_written(tmp_path, monkeypatch):
    """Else the sync at the end stands still for as long as writing all of it takes."""
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(
        os, "fdatasync", lambda descriptor: (synced.append(os.fstat(descriptor).st_size), real(descriptor))
    )
    monkeypatch.setattr(store_module, "PIECE_BYTES", 400)
    written: list[int] = []
    tensor = StoredTensor("parameters/w", "F32", (750,), memoryview(bytes(3000)))
    file = make_store(tmp_path).write_tensors(tmp_path / "file", [tensor], {"w": (0, 750)}, written.append, 1000)
    assert sum(written) == 3000 and max(written) == 400
    assert len(synced) >= 2 and max(b - a for a, b in zip([0, *synced], [*synced, file.bytes], strict=True)) <= 1400


def test_ranks_that_write_to_one_disk_share_what_may_wait_in_memory():
    """All sync at the same time, and no byte is seen to be written meanwhile."""
    assert sync_bytes_among(1) == SYNC_BYTES
    assert 8 * sync_bytes_among(8) == SYNC_BYTES
    assert sync_bytes_among(400) == 8 * 2**20


def test_a_rename_that_fails_leaves_what_it_would_have_replaced(tmp_path, monkeypatch):
    """An attempt that was out of the way for a while, and whose half-written save the next attempt swept."""
    late, sync = make_store(tmp_path, "a1"), store_module.sync_folder

    def meanwhile(folder: Path) -> None:
        sync(folder)
        if folder.name.startswith(".partial-step-00000005-a1"):
            monkeypatch.setattr(store_module, "sync_folder", sync)
            store = make_store(tmp_path, "a2")
            store.sweep()
            save(store, 5)

    monkeypatch.setattr(store_module, "sync_folder", meanwhile)
    with pytest.raises(FileNotFoundError):
        save(late, 5)
    (found,) = survey(tmp_path / "checkpoints").sound
    assert (found.step, found.manifest.attempt) == (5, "a2")
    assert not list((tmp_path / "checkpoints").glob(".*"))


def in_a_child(action: Callable[[], None]) -> int:
    """Run it in a forked process; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def die_at(moment: int) -> None:
    """SIGKILL this process before its so-and-so-many-th system call that changes something on disk."""
    count = 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            nonlocal count
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **named)

        return call

    for name in ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir", "chmod"):
        setattr(os, name, counted(getattr(os, name)))


def test_killed_at_any_moment_of_a_save_two_whole_checkpoints_remain(tmp_path):
    """Every system call of a save, the removal of the oldest included, is a moment to die at."""
    moment, killed = 0, 0
    while True:
        moment += 1
        folder = tmp_path / str(moment)
        for step in (10, 20):
            save(make_store(folder), step)
        third = make_store(folder, "a2")

        def die_in_save(moment: int = moment, third: Store = third) -> None:
            die_at(moment)
            save(third, 30)

        status = in_a_child(die_in_save)
        found = survey(folder / "checkpoints")
        assert [str(each) for each in found.passed_over] == [], moment
        for checkpoint in found.sound:
            checkpoint.verify()
        steps = [checkpoint.step for checkpoint in found.sound]
        assert steps in ([20, 10], [30, 20, 10], [30, 20]), (moment, steps)
        # The next attempt sweeps up and goes on.
        again = make_store(folder, "a3")
        again.sweep()
        save(again, 40)
        assert [each.step for each in survey(folder / "checkpoints").sound] == [40, steps[0]]
        assert not [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
        if not os.WIFSIGNALED(status):
            assert status == 0
            break
        killed += 1
    assert killed >= 20


@pytest.mark.parametrize("limit", ["the disk is full", "a file may not grow"])
def test_a_write_that_fails_leaves_the_older_checkpoints_and_nothing_else(tmp_path, monkeypatch, limit):
    store = make_store(tmp_path)
    save(store, 1)
    if limit == "the disk is full":

        def full(descriptor: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            save(store, 2, number=2)
        monkeypatch.undo()
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                save(store, 2, number=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    store.abandon(store.partial(2, 2))
    assert [path.name for path in store.folder.iterdir()] == ["step-00000001"]
    save(store, 2, number=3)
    assert [each.step for each in survey(store.folder).sound] == [2, 1]


def test_space_is_counted_beforehand(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    assert store.shortage(1000) is None
    usage = type("Usage", (), {"free": 5000})
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda folder: usage)
    reason = store.shortage(10**12)
    assert reason is not None and "1,000,008,388,608 bytes needed, 5,000 free" in reason


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_never_saved(tmp_path, value):
    store = make_store(tmp_path)
    part = np.ones(600_000, np.float32)
    part[-1] = value
    tensor = StoredTensor("exp_avg/w", "F32", part.shape, memoryview(part).cast("B"))
    with pytest.raises(NotSaved, match="exp_avg/w holds numbers that are not finite"):
        store.write_tensors(store.begin(1, 1) / "rank.safetensors", [tensor], {})


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_so_many_stay_by_step_whatever_the_clock_says(tmp_path, keep):
    store = make_store(tmp_path)
    for number, step in enumerate((5, 10, 15, 20, 25)):
        folder = save(store, step, number=number, keep=keep).folder
        os.utime(folder, (10**9 - step, 10**9 - step))  # the newest looks oldest
    assert [each.step for each in survey(store.folder).sound] == [25, 20, 15][:keep]


def test_unusable_ones_are_not_counted_and_a_higher_step_is_never_touched(tmp_path):
    store = make_store(tmp_path)
    for number, step in enumerate((10, 20, 30, 90)):
        save(store, step, number=number, keep=9)
    (store.folder / "step-00000030" / "manifest.json").unlink()
    (store.folder / "step-00000090" / "state.json").unlink()
    save(store, 40, number=9, keep=2)
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-00000020", "step-00000040", "step-00000090"]


def test_a_step_done_again_takes_the_place_of_the_unusable_one(tmp_path):
    store = make_store(tmp_path)
    save(store, 10)
    (store.folder / "step-00000010" / "state.json").write_text("{}")
    save(make_store(tmp_path, "a2"), 10)
    (only,) = survey(store.folder).sound
    only.verify()
    assert only.manifest.attempt == "a2" and only.manifest.parameters["w"][0] == ROWS


def test_what_a_failing_disk_kept_is_removed_later_and_nothing_else(tmp_path, monkeypatch):
    """A failed save, and what an attempt before left: both while nothing can be deleted."""
    store = make_store(tmp_path)
    (store.folder / ".partial-step-00000001-old-1").mkdir()
    failed, under_way = store.begin(2, 1), store.begin(3, 2)
    other = Store(store.folder, "another").begin(9, 1)
    other.rmdir()
    monkeypatch.setattr(store_module.shutil, "rmtree", lambda *_, **__: None)
    store.sweep()
    store.abandon(failed)
    store.sweep_failed()
    monkeypatch.undo()
    other.mkdir()
    store.sweep_failed()
    assert sorted(store.folder.iterdir()) == sorted([under_way, other])
