"""Folders that are either whole or not there, made by one process at a time.

A folder is built beside its final name and renamed into place; a lock per name keeps a second process from doing the
same work and lets it wait for the first one's result instead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO

from coremill.errors import InputError, StorageError
from coremill.files import CACHE_ADVICE, locked, sync_folder

_IN_USE: dict[Path, IO[bytes]] = {}  # locks that this process holds until it ends


def build_once(
    final: Path, *, is_whole: Callable[[Path], bool], build: Callable[[Path], None], on_wait: Callable[[], None]
) -> bool:
    """Make sure `final` is there and whole; True where it was already, False where `build` has made it now."""
    if is_whole(final):
        return True
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        # Without locks work may be done twice, never wrongly.
        with locked(final.with_name(f".{final.name}.lock"), on_wait) as has_lock:
            if is_whole(final):  # the process we waited for has made it
                return True
            if has_lock:
                _remove_leftovers(final)
            _build(final, build, is_whole)
            return False
    except OSError as error:
        raise _storage_problem(error, final) from error


def keep_in_use(folder: Path) -> None:
    """Until this process ends nobody drops the folder, which need not be there yet; it counts as the newest."""
    if folder in _IN_USE:
        return
    # Where there are no locks, or the cache may only be read, nothing is dropped either.
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        stream = _use_file(folder).open("wb")
        _IN_USE[folder] = stream
        os.utime(stream.fileno())
        fcntl.flock(stream, fcntl.LOCK_SH)


def drop_unused(parent: Path, pattern: str, *, keep: int) -> None:
    """Remove the folders of a pattern but the `keep` that were used last, and those that a process uses."""
    last_used: dict[Path, float] = {}
    for folder in parent.glob(pattern):
        with contextlib.suppress(OSError):
            last_used[folder] = _use_file(folder).stat().st_mtime
    for folder in sorted(last_used, key=lambda each: last_used[each], reverse=True)[keep:]:
        doomed = folder.with_name(f".{folder.name}.partial-{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError), _use_file(folder).open("rb+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _use_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.use")


def _build(final: Path, build: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> None:
    partial = final.with_name(f".{final.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        build(partial)
        sync_folder(partial)
        if final.exists() and not is_whole(final):
            shutil.rmtree(final)
        try:
            partial.rename(final)
        except OSError:
            if not is_whole(final):  # else another process without a lock was quicker
                raise
        sync_folder(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(final: Path) -> None:
    """What a killed process left: nobody else builds while we hold the lock."""
    for leftover in final.parent.glob(f".{final.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _storage_problem(error: OSError, final: Path) -> InputError | StorageError:
    where = str(error.filename or final.parent)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return InputError("the cache folder cannot be written", where=where, why=error.strerror, do=CACHE_ADVICE)
    do = "check the disk, or set COREMILL_CACHE to a folder on another one"
    return StorageError("the cache folder failed", where=where, why=error.strerror, do=do)
