"""Files on disks that fail and are shared: written whole or not at all, on the disk when it is said so, locked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from coremill.errors import StorageError

LOCK_POLL_SECONDS = 0.1
CACHE_ADVICE = "make it writable, or set COREMILL_CACHE to a folder that you may write"
# Some shared filesystems have no locks: Lustre mounted without flock, file systems in user space.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

LockState = Literal["got", "busy", "none"]  # none: the file system has no locks


def at_home(name: str | Path) -> Path:
    """`~` and `~user` as the shell has them; of a user whom this machine does not know, the name as it is."""
    return Path(os.path.expanduser(name))


def sync_file(stream: IO[Any]) -> None:
    """Until what was written to it is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Until the names in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Put a file in place in one move, so that a reader never sees half of it; raises OSError."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with fresh.open("w", encoding="utf-8", errors="replace") as stream:
            stream.write(text)
            sync_file(stream)
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """The same for a file that a run cannot do without: a disk that fails is said in words."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}", do="free space or check permissions"
        ) from error


def try_lock(descriptor: int) -> LockState:
    """Lock an open file for this process alone, without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "busy"
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return "none"
    return "got"


def anonymous_file(name: str) -> int:
    """The descriptor of a file without a place, for this process and those it is handed to: in memory, or on the disk
    where the kernel has none or forbids it (seccomp, vm.memfd_noexec)."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        import tempfile  # hardly ever

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None], *, most_seconds: float = float("inf")) -> Iterator[bool]:
    """Hold a lock file; `on_wait` hears once that another process has it. False: no locks here, or never let go."""
    with path.open("wb") as stream:
        deadline, told = time.monotonic() + most_seconds, False
        while (state := try_lock(stream.fileno())) == "busy" and time.monotonic() < deadline:
            if not told:
                on_wait()
            told = True
            time.sleep(LOCK_POLL_SECONDS)
        yield state == "got"
