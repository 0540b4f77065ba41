"""Puts checkpoints on disk so that one is either whole or not there, whatever is killed and whenever. No torch here.

    partial = store.begin(50, 1)       every rank: a fresh hidden folder
    file = store.write_tensors(...)    every rank: its own file, written, hashed on the way, fsynced
    store.commit(...)                  rank 0: state, manifest, fsync, rename to step-00000050, fsync of the parent
    store.prune(2)                     rank 0: only then older ones go, each renamed out of sight before it is deleted

Where hosts share no folder, each has such a store, and the one who leads there commits and prunes (committing.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coremill.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    Checkpoint,
    Manifest,
    StoredFile,
    step_folder_name,
    step_folders,
    step_of,
    survey,
)
from coremill.files import sync_folder

PARTIAL_PREFIX = ".partial-"
DISCARDED_PREFIX = ".discarded-"
FETCHED_PREFIX = ".fetched-"  # what a resume brought from other hosts
SEEN_PREFIX = ".seen-"  # one host writes it, others look for it
SET_ASIDE_PREFIX = "set-aside-"  # what came after the step that `train --from` named: of no use to us, and kept
GO_ON_FROM = ".go-on-from"  # left by --from for the ranks, and for the folders of other hosts
START_ANEW = ".start-anew"  # left by --fresh for the folders of other hosts
# Large enough for full disk speed, small enough that hash and check find the piece still in the cache.
PIECE_BYTES = 2 * 2**20
# So much may wait in memory for the disk, of all ranks that write to it: else that is a part of the whole machine's,
# and the sync in the end stands still for as long as writing it takes.
SYNC_BYTES = 256 * 2**20
LEAST_SYNC_BYTES = 8 * 2**20
# Beyond the tensors: headers, state, manifest, and what file systems keep for themselves.
SPARE_BYTES = 8 * 2**20


class NotSaved(Exception):
    """A save failed; the text says why. Training goes on."""


@dataclass(frozen=True)
class StoredTensor:
    """What goes into a file: a name, a type in the words of safetensors, a shape, and the memory it lies in."""

    name: str
    dtype: str  # F32, BF16, I8 or U8
    shape: tuple[int, ...]
    data: memoryview  # of bytes


class Store:
    """A folder of checkpoints, as one attempt of a run sees it."""

    def __init__(self, folder: Path, attempt: str) -> None:
        self.folder = folder
        self.attempt = attempt  # agreed by all ranks, new with every start of the run
        self._left: set[Path] = set()  # what a failing disk did not let us delete

    def make(self) -> None:
        """Create the folder, writable by us alone whatever the umask."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o755)

    def partial(self, step: int, number: int) -> Path:
        """Where save `number` of this attempt is written: a name nobody used before."""
        return self.folder / f"{PARTIAL_PREFIX}{step_folder_name(step)}-{self.attempt}-{number}"

    def begin(self, step: int, number: int) -> Path:
        """Every rank calls it; whoever comes first makes the folder."""
        partial = self.partial(step, number)
        with contextlib.suppress(FileExistsError):
            partial.mkdir(mode=0o755)
            partial.chmod(0o755)
        return partial

    def write_tensors(
        self,
        path: Path,
        tensors: Sequence[StoredTensor],
        rows: Mapping[str, tuple[int, int]],
        on_bytes: Callable[[int], None] = lambda count: None,
        sync_bytes: int = SYNC_BYTES,
    ) -> StoredFile:
        """One safetensors file in a single pass over the memory; raises NotSaved where a number is not finite.

        `on_bytes` hears of every piece that is written; after every `sync_bytes` it waits for the disk.
        """
        entries: dict[str, Any] = {"__metadata__": {"format": "coremill"}}
        position = 0
        for tensor in tensors:
            end = position + tensor.data.nbytes
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [position, end]}
            position = end
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        with HashedFile(path, sync_bytes) as file:
            file.write(memoryview(len(header).to_bytes(8, "little") + header))
            for tensor in tensors:
                for start in range(0, tensor.data.nbytes, PIECE_BYTES):
                    piece = tensor.data[start : start + PIECE_BYTES]
                    if not _is_finite(tensor.dtype, piece):
                        raise NotSaved(f"{tensor.name} holds numbers that are not finite")
                    file.write(piece)
                    on_bytes(piece.nbytes)
        return StoredFile(path.name, file.bytes, file.digest.hexdigest(), dict(rows))

    def commit(self, partial: Path, manifest: Manifest, state: Mapping[str, Any]) -> Checkpoint:
        """Make a written folder a checkpoint; before the rename nothing of it counts, after it everything does."""
        whole, manifest_text, state_text = sealed(manifest, state)
        return Checkpoint(self.put(partial, whole.step, manifest_text, state_text), whole)

    def put(
        self,
        partial: Path,
        step: int,
        manifest_text: bytes,
        state_text: bytes,
        may_rename: Callable[[], None] = lambda: None,
    ) -> Path:
        """The same from texts, which are those of every host that has a part of this save.

        `may_rename` is asked last and may raise: writing takes long, and the save may have been given up meanwhile. An
        attempt that went on elsewhere has removed this folder (`sweep`): the rename fails, and what it would have
        replaced stays.
        """
        for name, text in ((STATE_FILE, state_text), (MANIFEST_FILE, manifest_text)):
            with HashedFile(partial / name) as file:
                file.write(memoryview(text))
        sync_folder(partial)
        target = self.folder / step_folder_name(step)
        may_rename()
        # An unusable one, or one that was passed over: this step was done again.
        replaced = self._hide(target) if target.exists() else None
        try:
            partial.rename(target)
        except OSError:
            if replaced is not None:
                replaced.rename(target)
            raise
        sync_folder(self.folder)
        if replaced is not None:
            self._remove(replaced)
        return target

    def withdraw(self, step: int) -> None:
        """Take a commit back: other hosts did not get as far."""
        with contextlib.suppress(OSError):  # it is not whole without them, and passed over where it stays
            self._discard(self.folder / step_folder_name(step))

    def abandon(self, partial: Path) -> None:
        """A failed save leaves nothing behind; where the disk does not let us, `sweep_failed` tries again."""
        self._remove(partial)

    def prune(self, keep: int, bad: frozenset[str] = frozenset()) -> None:
        """Let older checkpoints go; `keep` whole ones stay, and those in `bad` are not counted as such."""
        whole = [each.folder.name for each in survey(self.folder).sound if not each.away]
        kept = [name for name in whole if name not in bad][:keep]
        if len(kept) == keep:
            self.prune_to(kept)

    def prune_to(self, kept: Sequence[str]) -> None:
        """Let all go that are older than the first of these, newest first, and not among them.

        Unusable ones go too once enough newer whole ones are there; a higher step is never touched.
        """
        for path in step_folders(self.folder):
            if path.name not in kept and step_of(path.name) < step_of(kept[0]):
                self._discard(path)

    def steps_after(self, step: int) -> list[int]:
        """Of which there are checkpoints, usable or not."""
        return sorted(later for path in step_folders(self.folder) if (later := step_of(path.name)) > step)

    def set_aside(self, after_step: int, name: str) -> None:
        """Move all checkpoints of later steps into a folder of this name.

        The newest first: whoever is killed on the way leaves no newer one that the run would go on from.
        """
        later = [path for path in step_folders(self.folder) if step_of(path.name) > after_step]
        for path in later:
            (self.folder / name).mkdir(mode=0o755, exist_ok=True)
            path.rename(self.folder / name / path.name)
        if later:
            sync_folder(self.folder / name)
            sync_folder(self.folder)

    def sweep(self) -> None:
        """Remove what killed attempts left half-written; called once at the start, before any save of this attempt."""
        prefixes = (PARTIAL_PREFIX, DISCARDED_PREFIX, FETCHED_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                if name.startswith(prefixes) and self.attempt not in name:
                    self._remove(self.folder / name)
                elif name.startswith(SEEN_PREFIX) and self.attempt not in name:
                    with contextlib.suppress(OSError):
                        (self.folder / name).unlink()

    def sweep_failed(self) -> None:
        """Try once more to remove what could not be removed: by name, so never what anybody still writes."""
        for path in tuple(self._left):
            self._remove(path)

    def empty(self) -> None:
        for path in step_folders(self.folder):
            self._discard(path)
        self.sweep()

    def clear(self) -> None:
        """Remove every checkpoint: the run starts anew. Other hosts may have folders of their own: they are told."""
        self.empty()
        with contextlib.suppress(OSError):  # a folder that cannot be written is refused by the ranks
            self.make()
            (self.folder / START_ANEW).touch()

    def shortage(self, needed_bytes: int) -> str | None:
        """Why a save of that size would not fit on the disk; None: it fits."""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            return f"{self.folder} cannot be asked for its free space: {error.strerror or error}"
        needed = needed_bytes + SPARE_BYTES
        if free >= needed:
            return None
        return f"the disk is too full: {needed:,} bytes needed, {free:,} free in {self.folder}"

    def _discard(self, path: Path) -> None:
        """Out of sight in one move, then deleted: half a checkpoint is never seen under its name."""
        self._remove(self._hide(path))

    def _hide(self, path: Path) -> Path:
        hidden = path.with_name(f"{DISCARDED_PREFIX}{path.name}-{self.attempt}")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        return hidden

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        try:
            path.lstat()
        except FileNotFoundError:
            self._left.discard(path)
        except OSError:
            self._left.add(path)
        else:
            self._left.add(path)


def sealed(manifest: Manifest, state: Mapping[str, Any]) -> tuple[Manifest, bytes, bytes]:
    """The manifest with the state among its files, and both as they are written."""
    text = json.dumps(state, indent=1, sort_keys=True, allow_nan=False).encode()
    entry = StoredFile(STATE_FILE, len(text), hashlib.sha256(text).hexdigest(), {})
    whole = Manifest(**{**vars(manifest), "files": (*manifest.files, entry)})
    return whole, whole.to_text().encode(), text


def sync_bytes_among(ranks: int) -> int:
    """After how many bytes each of so many ranks that write to one disk syncs: all do at the same time."""
    return max(LEAST_SYNC_BYTES, SYNC_BYTES // ranks)


class SteadyFile:
    """A new file that goes to the disk while it is written, not all at once in the end: who watches sees it grow."""

    def __init__(self, path: Path, sync_bytes: int = SYNC_BYTES) -> None:
        self._path, self._sync_bytes = path, sync_bytes
        self._descriptor: int | None = None
        self._unsynced_bytes = 0
        self.bytes = 0

    def open(self) -> None:
        # O_EXCL: nothing that lies there already is ever written over.
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, data: memoryview) -> None:
        assert self._descriptor is not None
        self.bytes += data.nbytes
        self._unsynced_bytes += data.nbytes
        while data.nbytes:
            data = data[os.write(self._descriptor, data) :]
        if self._unsynced_bytes >= self._sync_bytes:
            os.fdatasync(self._descriptor)
            self._unsynced_bytes = 0

    def sync(self) -> None:
        assert self._descriptor is not None
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class FirstFailure:
    """Writes until one has failed, and remembers why: who takes what other ranks send must take it all the same."""

    error: OSError | None = None

    def attempt(self, write: Callable[..., object], *arguments: Any) -> None:
        if self.error is None:
            try:
                write(*arguments)
            except OSError as error:
                self.error = error


class HashedFile(SteadyFile):
    """The same, hashed while it is written, on the disk when the block ends."""

    def __init__(self, path: Path, sync_bytes: int = SYNC_BYTES) -> None:
        super().__init__(path, sync_bytes)
        self.digest = hashlib.sha256()

    def __enter__(self) -> HashedFile:
        self.open()
        return self

    def write(self, data: memoryview) -> None:
        self.digest.update(data)
        super().write(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.sync()
        finally:
            self.close()


def _is_finite(dtype: str, piece: memoryview) -> bool:
    """Of numbers that could be otherwise."""
    if dtype == "BF16":  # the upper half of fp32
        return bool((np.frombuffer(piece, np.uint16) & 0x7F80 != 0x7F80).all())
    return dtype != "F32" or bool(np.isfinite(np.frombuffer(piece, np.float32)).all())
