"""One run, one owner: who holds a folder, for how long, and what a second start is told."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from coremill.errors import InputError
from coremill.files import LockState
from coremill.hosts.host_restarts import SILENCE_SECONDS
from coremill.world import folder_lock, run_lock
from coremill.world.folder_lock import LOCK_FILE, Busy, FolderLock, Holder, file_system_of, verdict
from coremill.world.run_lock import RECONNECT_SECONDS, FolderTaken, OwnedFolders, join_run

HOLD = """
import sys, time
from pathlib import Path
from coremill.world.run_lock import OwnedFolders, join_run
owned = OwnedFolders()
owned.take(Path(sys.argv[1]), Path(sys.argv[2]), where_run="a", where_checkpoints="b", say=print)
print("held", flush=True)
sys.stdin.readline()
owned.release()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "STALE_SECONDS", 0.6)
    monkeypatch.setattr(folder_lock, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(folder_lock, "file_system_of", lambda folder: "lustre")  # the harder case


@pytest.fixture
def owned() -> Iterator[OwnedFolders]:
    folders = OwnedFolders()
    yield folders
    folders.release()


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)


def take(folders: OwnedFolders, run: Path, checkpoints: Path | None = None) -> list[str]:
    said: list[str] = []
    places = {"where_run": "run.yaml:3 (run.folder)", "where_checkpoints": "run.yaml:4 (checkpoint.folder)"}
    folders.take(run, checkpoints or run / "checkpoints", say=said.append, patience_seconds=0.3, **places)
    return said


def leave_lease(folder: Path, **changes: object) -> Path:
    """A lock file of a holder that is gone, or elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    path.write_text(json.dumps(asdict(replace(Holder.this_process(folder), host="node9", pid=4711, **changes))))
    return path


def another_process(run: Path, checkpoints: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, run, checkpoints], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "held\n", process.stderr.read()
    return process


def test_a_second_process_is_told_who_holds_it_and_a_killed_one_holds_nothing(
    tmp_path: Path, owned: OwnedFolders
) -> None:
    run = tmp_path / "run"
    with another_process(run, run / "checkpoints") as process:
        with pytest.raises(InputError) as refused:
            take(owned, run)
        assert f"process {process.pid}, since 20" in refused.value.what and str(run) in refused.value.what
        assert refused.value.where == "run.yaml:3 (run.folder)" and refused.value.exit_code == 78
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert take(owned, run) == []  # at once, and without a word
    owned.release()
    assert not list(run.rglob(LOCK_FILE))


def test_the_checkpoint_folder_is_held_too(tmp_path: Path, owned: OwnedFolders) -> None:
    with another_process(tmp_path / "one", tmp_path / "shared") as process:
        with pytest.raises(InputError, match="in use by the run in .*/one: host .*") as refused:
            take(owned, tmp_path / "two", tmp_path / "shared")
        assert refused.value.where == "run.yaml:4 (checkpoint.folder)"
        assert not (tmp_path / "two").exists(), "a refused start leaves nothing"
        process.communicate("\n")
    take(owned, tmp_path / "two", tmp_path / "shared")
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_was_there_stays(tmp_path: Path, owned: OwnedFolders) -> None:
    take(owned, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", LOCK_FILE]
    owned.release()
    assert tmp_path.is_dir() and list(tmp_path.iterdir()) == []
    take(owned, tmp_path, tmp_path / "." / "x" / "..")  # checkpoints beside everything else: one folder, one lock
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_FILE]


def test_a_folder_that_cannot_be_held_is_said(tmp_path: Path, owned: OwnedFolders) -> None:
    (tmp_path / "file").touch()
    said = take(owned, tmp_path / "file" / "run")
    assert len(said) == 2 and "file/run cannot be held (Not a directory)" in said[0]


@pytest.mark.parametrize("locks", [True, False])
def test_another_hosts_lease_counts_while_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owned: OwnedFolders, locks: bool
) -> None:
    """Its clock may be a day off: only change is looked at. A lock that we got may be one of this host alone."""
    if not locks:
        without_locks(monkeypatch)
    path = leave_lease(tmp_path, boot_id="of another kernel", since=time.time() + 86400)
    looks = iter(range(1, 1000))
    read = folder_lock._read

    def renewed_meanwhile(of: Path) -> Holder | None:
        if next(looks) > 5:
            os.utime(path, ns=(1, next(looks)))
        return read(of)

    with monkeypatch.context() as patched:
        patched.setattr(folder_lock, "_read", renewed_meanwhile)
        patched.setattr(folder_lock, "STALE_SECONDS", 60.0)
        with pytest.raises(InputError, match="host node9, process 4711"):
            take(owned, tmp_path)
    said = take(owned, tmp_path)  # nobody renews it any more
    assert len(said) == 1 and "was held by host node9" in said[0]
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_without_locks_a_dead_process_of_this_machine_is_seen_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owned: OwnedFolders
) -> None:
    without_locks(monkeypatch)
    alive = Holder.this_process(tmp_path)
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(replace(alive, token="another"))))
    with pytest.raises(InputError, match=f"process {os.getpid()}"):
        take(owned, tmp_path)
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(replace(alive, token="another", process_started=1.0))))
    assert take(owned, tmp_path) == []


def test_without_locks_the_last_one_to_write_owns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)
    sleep = time.sleep

    def another_comes(seconds: float) -> None:
        if seconds == folder_lock.SETTLE_SECONDS:
            leave_lease(tmp_path, boot_id="of another kernel")
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", another_comes)
    with pytest.raises(Busy, match="node9"):
        FolderLock(tmp_path, tmp_path)


def test_a_disk_of_one_machine_needs_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owned: OwnedFolders
) -> None:
    monkeypatch.setattr(folder_lock, "file_system_of", lambda folder: "ext4")
    leave_lease(tmp_path, boot_id="before the machine was started again")
    assert take(owned, tmp_path) == []  # at once, and without a word
    assert owned._thread is None
    descriptors = {os.readlink(entry): entry.name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    flags = Path("/proc/self/fdinfo", descriptors[str(tmp_path / LOCK_FILE)]).read_text().split()[3]
    assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY, "a disk can still turn read-only"
    second = OwnedFolders()
    with pytest.raises(InputError, match=f"process {os.getpid()}"):
        take(second, tmp_path)


def test_file_systems_are_known() -> None:
    assert [file_system_of(Path(mount)) for mount in ("/dev/shm", "/proc")] == ["tmpfs", "proc"]


@pytest.mark.parametrize(("file_system", "seconds"), [("ceph", 3), ("nfs4", 9), ("fuse.glusterfs", 9), ("", 9)])
def test_a_lease_is_looked_at_for_longer_than_a_host_may_be_shown_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owned: OwnedFolders, file_system: str, seconds: int
) -> None:
    monkeypatch.setattr(folder_lock, "STALE_SECONDS", 3.0)
    monkeypatch.setattr(folder_lock, "CACHED_STALE_SECONDS", 9.0)
    monkeypatch.setattr(folder_lock, "file_system_of", lambda folder: file_system)
    now = iter(range(1000))  # a second a look
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    leave_lease(tmp_path, boot_id="of another kernel")
    said = take(owned, tmp_path, tmp_path)
    assert said[0].endswith(f": looking for {seconds} s whether it still is") and seconds <= next(now) <= seconds + 4


def test_a_host_that_was_lost_is_taken_over_though_its_file_server_still_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owned: OwnedFolders
) -> None:
    monkeypatch.setattr(folder_lock, "LOST_CLIENT_SECONDS", 0.8)
    monkeypatch.setattr(run_lock, "RENEW_SECONDS", 0.02)
    suspended = OwnedFolders()
    take(suspended, tmp_path, tmp_path)
    held = suspended._locks[0]
    suspended._ends.set()  # nobody renews it, and the lock stays
    assert suspended._thread is not None
    suspended._thread.join()
    held.holder = replace(held.holder, host="node9", boot_id="of another kernel")
    held.path.write_text(json.dumps(asdict(held.holder)))
    assert "looking for 1 s" in take(owned, tmp_path, tmp_path)[0]
    owned.check_now()
    with held.path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this machine's processes are kept out by the kernel
    with pytest.raises(FolderTaken, match=f"taken over by another run: host .*, process {os.getpid()}"):
        suspended.check_now()
    suspended.release()
    assert held.path.exists(), "it is the other one's now"


def test_a_head_that_connects_anew_waits_until_the_host_has_noticed_too() -> None:
    assert RECONNECT_SECONDS > SILENCE_SECONDS + 10


def test_another_node_joins_its_own_run_only(tmp_path: Path, owned: OwnedFolders) -> None:
    here = {"where_run": "run.folder", "say": print, "patience_seconds": 0.1}
    join_run(tmp_path / "none", "node1:29500", **here)  # a folder of its own, or the first node is yet to come
    assert not (tmp_path / "none").exists()
    places = {"where_run": "", "where_checkpoints": "", "say": print}
    owned.take(tmp_path, tmp_path / "checkpoints", meeting="node1:29500", **places)
    join_run(tmp_path, "node1:29500", **here)
    with pytest.raises(InputError, match=f"process {os.getpid()}, since 20"):
        join_run(tmp_path, "node1:31111", **here)
    owned.release()
    join_run(tmp_path, "node1:31111", **here)
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_node_that_joins_makes_no_lock_where_it_is_let_go_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = leave_lease(tmp_path, boot_id="of another kernel")
    read = folder_lock._read

    def let_go(of: Path) -> Holder | None:
        path.unlink()
        return read(of)

    monkeypatch.setattr(folder_lock, "_read", let_go)
    join_run(tmp_path, "node1:31111", where_run="run.folder", say=print, patience_seconds=60)
    assert not path.exists()


def test_who_was_taken_over_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owned: OwnedFolders) -> None:
    monkeypatch.setattr(run_lock, "RENEW_SECONDS", 0.02)
    take(owned, tmp_path)
    owned.check()
    before = (tmp_path / LOCK_FILE).stat().st_mtime_ns
    deadline = time.monotonic() + 60
    while (tmp_path / LOCK_FILE).stat().st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / LOCK_FILE).stat().st_mtime_ns != before, "the lease is renewed"
    leave_lease(tmp_path, boot_id="of another kernel")
    while time.monotonic() < deadline:
        try:
            owned.check()
        except InputError as error:
            assert "taken over by another run: host node9" in error.what
            assert error.why is not None and "or both were started at the same moment" in error.why
            break
        time.sleep(0.02)
    owned.release()
    assert (tmp_path / LOCK_FILE).exists(), "it is the other one's now"


def test_verdicts(tmp_path: Path) -> None:
    here = Holder.this_process(tmp_path)
    there, container = replace(here, boot_id="other"), replace(here, pid_namespace="other")

    def of(
        lock: LockState, holder: Holder | None, waited: float = 0.0, *, changed: bool = False, shared: bool = True
    ) -> str:
        how = {"is_shared": shared, "has_changed": changed, "stale_seconds": folder_lock.STALE_SECONDS}
        return verdict(lock, holder, waited_seconds=waited, **how)  # type: ignore[arg-type]

    soon, late, very_late = folder_lock.ENDING_SECONDS, folder_lock.STALE_SECONDS, folder_lock.LOST_CLIENT_SECONDS
    assert of("got", None) == of("none", None) == "free"
    assert of("got", here) == "free"  # the kernel let it go
    assert (of("busy", here), of("busy", here, soon)) == ("wait", "held")
    assert (of("busy", None), of("busy", None, soon)) == ("wait", "held")
    assert of("none", here, soon) == "held"
    for holder, lock in ((there, "got"), (there, "none"), (container, "none")):
        assert (of(lock, holder), of(lock, holder, late)) == ("wait", "free")
        assert of(lock, holder, late, changed=True) == "held"
    assert of("got", container) == "free"  # one kernel, one lock
    assert of("got", there, shared=False) == "free"  # this machine before it was started again
    # A file server may hold the lock of a host that vanished; who renews nothing for so long is not there.
    assert (of("busy", there, late), of("busy", there, very_late)) == ("wait", "free")
    assert of("busy", there, very_late, changed=True) == "held"
