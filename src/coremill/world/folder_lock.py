"""A folder that one process holds, on whatever file system: FOLDER/run.lock says who, and is gone when it is let go.

On one machine the kernel decides: an flock on that file dies with its holder, also with one that was killed. Shared
file systems may lock between hosts, on each host for itself, or not at all, and nobody tells which. So there the file
is a lease as well: its holder touches it every few seconds, and what another host left in it counts as alive while it
keeps changing, and only then: a file server may keep the lock of a host that is gone. Clocks are never compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import psutil

from coremill.files import LockState, try_lock
from coremill.hardware.probe import boot_id

LOCK_FILE = "run.lock"
STALE_SECONDS = 20.0  # a lease of another host that did not change for so long has no holder
CACHED_STALE_SECONDS = 90.0  # the same where a host may be shown a time stamp from before (NFS: up to 60 s)
ENDING_SECONDS = 1.0  # a process of this machine that was killed may need so long to be gone
LOST_CLIENT_SECONDS = 150.0  # the same where it is locked too: a server frees a vanished host's locks (NFS: in 90 s)
GONE_SECONDS = 5.0  # a folder that cannot be made again within this is not there
SETTLE_SECONDS = 0.5  # without locks: whoever wrote last owns it, and all look again after this
POLL_SECONDS = 0.1
# Nobody but this machine writes there, and a disk that came from another one has nobody left who holds it.
OF_ONE_MACHINE = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)  # fmt: skip
# Every host sees a time stamp as it is.
COHERENT = frozenset({"beegfs", "ceph", "gfs2", "gpfs", "lustre", "ocfs2"})

Say = Callable[[str], None]


@dataclass(frozen=True)
class Holder:
    """Who holds a folder, as its lock file says."""

    run: str  # the run folder
    meeting: str  # where the nodes of the run meet; empty: it has one
    host: str
    pid: int
    since: float  # unix seconds, by the clock of that host
    token: str  # of this one lock
    boot_id: str  # of the kernel; empty: unknown
    pid_namespace: str
    process_started: float

    @staticmethod
    def this_process(run: Path, meeting: str = "") -> Holder:
        return Holder(
            run=str(run),
            meeting=meeting,
            host=socket.gethostname(),
            pid=os.getpid(),
            since=time.time(),
            token=uuid.uuid4().hex,
            boot_id=boot_id(),
            pid_namespace=_pid_namespace(),
            process_started=psutil.Process().create_time(),
        )

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the same kernel runs it, in whatever container."""
        return bool(self.boot_id) and self.boot_id == boot_id()

    @property
    def words(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"host {self.host}, process {self.pid}, since {since}"

    def is_alive_here(self) -> bool | None:
        """Whether that process of this machine is still there; None where its number means nothing here."""
        if not self.is_on_this_machine or self.pid_namespace != _pid_namespace():
            return None
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.process_started) < 1
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class Busy(Exception):
    """Somebody else holds the folder."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__("unknown" if holder is None else holder.words)
        self.holder = holder


class FolderLock:
    """One folder, held by this process until it is released or the process ends."""

    def __init__(
        self,
        folder: Path,
        run: Path,
        meeting: str = "",
        *,
        say: Say = lambda text: None,
        mode: int | None = None,
        patience_seconds: float = ENDING_SECONDS,
    ) -> None:
        """Take it, or raise Busy; a folder that is not there is made. Raises OSError where nothing can be written.

        A holder on this machine that is still there after `patience_seconds` is no longer ending.
        """
        self.path = folder / LOCK_FILE
        self._created = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        if mode is not None and folder in self._created:
            folder.chmod(mode)
        self.holder = Holder.this_process(run, meeting)
        file_system = file_system_of(folder)
        self.is_shared = file_system not in OF_ONE_MACHINE
        try:
            self._descriptor = _wait_for(self.path, say, patience_seconds, file_system)
            try:
                self._claim()
            except BaseException:
                os.close(self._descriptor)
                raise
        except BaseException:
            self._remove_created()
            raise

    def renew(self) -> Holder | None:
        """Show other hosts that we are alive; returns who has taken it over, where somebody has."""
        other = self._other_holder()
        if other is None:
            with contextlib.suppress(OSError):  # storage that is away for a while ends no run
                os.utime(self._descriptor)
        return other

    def release(self) -> None:
        """Let it go; what was made for it and is still empty goes too."""
        if self._other_holder() is None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._remove_created()

    def _claim(self) -> None:
        text = json.dumps(asdict(self.holder)).encode() + b"\n"
        if try_lock(self._descriptor) == "got":
            self.path.write_bytes(text)
            return
        fresh = self.path.with_name(f".{self.path.name}.{self.holder.token}")
        fresh.write_bytes(text)
        descriptor = _open(fresh, is_shared=self.is_shared)
        os.close(self._descriptor)
        self._descriptor = descriptor
        # Before anybody sees it, where there are locks: the one on the file before is a lost host's.
        try_lock(descriptor)
        fresh.replace(self.path)
        time.sleep(SETTLE_SECONDS)
        if (other := self._other_holder()) is not None:
            raise Busy(other)

    def _other_holder(self) -> Holder | None:
        """None also where the file is gone or cannot be read."""
        holder = _read(self.path)
        return None if holder is None or holder.token == self.holder.token else holder

    def _remove_created(self) -> None:
        with contextlib.suppress(OSError):  # not empty
            for folder in self._created:
                folder.rmdir()


def wait_for_own(folder: Path, meeting: str, *, say: Say, patience_seconds: float) -> None:
    """As a node that holds nothing: until nobody but the run that meets there holds the folder; else raises Busy."""
    with contextlib.suppress(FileNotFoundError):  # nobody does
        os.close(_wait_for(folder / LOCK_FILE, say, patience_seconds, file_system_of(folder), joins=meeting))


def _wait_for(path: Path, say: Say, patience_seconds: float, file_system: str, *, joins: str | None = None) -> int:
    """A descriptor of the lock file, once nobody else holds it; raises Busy where somebody does.

    The run that meets at `joins` is nobody else; who joins makes no file: FileNotFoundError where there is none.
    """
    is_shared = file_system not in OF_ONE_MACHINE
    stale_seconds = STALE_SECONDS if file_system in COHERENT else CACHED_STALE_SECONDS
    began = time.monotonic()
    first: tuple[str, int] | None = None  # what the lease was when we came
    told = False
    while True:
        try:
            descriptor = _open(path, is_shared=is_shared, create=joins is None)
        except FileNotFoundError:  # its holder took file or folder away between two of our looks
            if joins is not None or time.monotonic() - began >= GONE_SECONDS:
                raise
            path.parent.mkdir(parents=True, exist_ok=True)
            continue
        try:
            lock, holder = try_lock(descriptor), _read(path)
            stamp = None if holder is None else (holder.token, os.stat(path).st_mtime_ns)
            first = first or stamp
            waited = time.monotonic() - began
            found = verdict(
                lock,
                holder,
                is_shared=is_shared,
                has_changed=stamp != first,
                waited_seconds=waited,
                patience_seconds=patience_seconds,
                stale_seconds=stale_seconds,
            )
            if joins is not None and holder is not None and holder.meeting == joins:
                return descriptor
            if found == "held":
                raise Busy(holder)
            if found == "free" and (lock == "none" or _is_file_at(descriptor, path)):
                return descriptor
            if found == "wait" and holder is not None and not told and not holder.is_on_this_machine:
                seconds = LOST_CLIENT_SECONDS if lock == "busy" else stale_seconds
                say(f"{path.parent} was held by {holder.words}: looking for {seconds:.0f} s whether it still is")
                told = True
            elif found == "wait" and holder is not None and not told and waited >= ENDING_SECONDS:
                say(f"{path.parent} is held by {holder.words}: waiting for {patience_seconds:.0f} s for its end")
                told = True
        except FileNotFoundError:  # released since it was opened
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(POLL_SECONDS)


def verdict(
    lock: LockState,
    holder: Holder | None,
    *,
    is_shared: bool,
    has_changed: bool,
    waited_seconds: float,
    patience_seconds: float = ENDING_SECONDS,
    stale_seconds: float = STALE_SECONDS,
) -> Literal["free", "held", "wait"]:
    """Whether a folder is held, by its lock, by who is written there, and by whether that changed while we looked."""
    alive: bool | None = lock == "busy"
    if holder is not None and is_shared and not holder.is_on_this_machine:
        alive = None  # the lock may be one of this host only
    elif holder is not None and lock == "none":
        alive = holder.is_alive_here()
    if alive is not None:
        return "free" if not alive else "held" if waited_seconds >= patience_seconds else "wait"
    if has_changed:
        return "held"
    return "free" if waited_seconds >= (LOST_CLIENT_SECONDS if lock == "busy" else stale_seconds) else "wait"


def _open(path: Path, *, is_shared: bool, create: bool = True) -> int:
    """A network file system locks what is open for writing only; a disk cannot turn read-only while something is."""
    os.close(os.open(path, os.O_WRONLY | (os.O_CREAT if create else 0) | os.O_CLOEXEC, 0o644))
    return os.open(path, (os.O_RDWR if is_shared else os.O_RDONLY) | os.O_CLOEXEC)


def file_system_of(folder: Path) -> str:
    """Its name, as the kernel has it; empty: unknown, which counts as shared by hosts."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return ""
    return next((words[words.index("-") + 1] for words in mounts if words[2] == wanted), "")


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _read(path: Path) -> Holder | None:
    """Opened anew each time: a network file system looks at the server then."""
    try:
        document = json.loads(path.read_bytes())
        return Holder(**{field.name: document[field.name] for field in fields(Holder)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
