"""Disks of our own: small ones that fill up, ones that hang. Mounted where only this process and its children see them.

The first call moves the process into a mount namespace of its own: whatever is mounted is gone when the last of them
ends, however that happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNS = 0x00020000
_is_apart = False


def why_no_mounts() -> str | None:
    """What is missing for disks of our own."""
    missing = [name for name in ("mount", "umount") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return None if os.geteuid() == 0 else "only root can mount"


def why_no_freezing() -> str | None:
    """What is missing for a disk that hangs."""
    missing = [name for name in ("fsfreeze", "mkfs.ext4") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if not Path("/dev/loop-control").exists():
        return "no loop devices"
    return why_no_mounts()


@dataclass(frozen=True)
class SmallDisk:
    """A file system in memory."""

    path: Path

    def resize(self, size_bytes: int) -> None:
        """Larger or smaller, as it is."""
        _run("mount", "-o", f"remount,size={size_bytes}", str(self.path))


@contextlib.contextmanager
def mounted_tmpfs(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """A disk of that size for the time of the block."""
    _be_apart()
    path.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=755", "chaos", str(path))
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", str(path))


@contextlib.contextmanager
def mounted_ext4(path: Path, size_bytes: int = 64 * 2**20) -> Iterator[Path]:
    """A real file system that can be frozen, on a file beside the mount point."""
    _be_apart()
    path.mkdir(parents=True, exist_ok=True)
    image = path.with_name(f"{path.name}.image")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", "-F", str(image))
    _run("mount", "-o", "loop", str(image), str(path))
    try:
        path.chmod(0o755)
        yield path
    finally:
        _run("umount", "--lazy", str(path))
        image.unlink(missing_ok=True)


def set_read_only(path: Path, read_only: bool) -> None:
    """As kernels do after an error of the device; between two files that are open for writing."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return _run("mount", "-o", "remount,ro" if read_only else "remount,rw", str(path))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@contextlib.contextmanager
def frozen(path: Path, longest_seconds: float = 120.0) -> Iterator[None]:
    """Every write to this file system waits, as on a network file system whose server is gone.

    Whoever waits cannot even be killed, so a watchman thaws it after `longest_seconds` if we do not.
    """
    watchman = subprocess.Popen(
        ["sh", "-c", f"sleep {longest_seconds}; fsfreeze --unfreeze {path}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _run("fsfreeze", "--freeze", str(path))
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(path)], capture_output=True)  # the watchman may have been
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(watchman.pid, 9)
        watchman.wait()


def _be_apart() -> None:
    global _is_apart
    if _is_apart:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS)")
    _run("mount", "--make-rprivate", "/")
    _is_apart = True


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
