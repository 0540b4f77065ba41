"""What a checkpoint says about itself, and whether it can be believed. No torch here: launcher and ranks both ask.

    CHECKPOINTS/step-00000050/  manifest.json  state.json  rank-00000-of-00002.safetensors ...

The manifest names every file with its size and SHA-256, which rows of which parameter each file holds, and carries a
hash of itself. The newest checkpoint is the one with the highest step in its name and manifest, never the youngest
file: clocks of machines differ. One that cannot be believed is passed over, with the reason, for the one before it.

Where hosts share no folder, each has the same whole manifest beside its own files: it names all files of all hosts, and
who wrote which. Here such a checkpoint is sound when its manifest is; whether all files are somewhere, ranks find out
together (agreement.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.world.heartbeat import HEARTBEAT

FORMAT = "coremill-checkpoint"
VERSION, SPREAD_VERSION = 1, 2  # in one folder; over several, with the key `hosts`
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
STEP_FOLDER = re.compile(r"step-(\d{8,})")
READ_BYTES = 4 * 2**20
# A manifest of 400 ranks and 1,000 parameters has 30 MB; anything far larger is not ours.
MAX_MANIFEST_BYTES = 500_000_000


class Unusable(Exception):
    """A checkpoint cannot be believed; the text says why."""


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint; `rows` are the first row and the end it holds of each parameter."""

    name: str
    bytes: int
    sha256: str
    rows: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is in a checkpoint."""

    step: int
    attempt: str  # of the run that wrote it
    world_size: int
    engine: str
    parameters: Mapping[str, tuple[int, ...]]  # whole shapes
    files: tuple[StoredFile, ...]
    versions: Mapping[str, str]
    hosts: Mapping[str, str] = field(default_factory=dict)  # who wrote each file; empty: all lie in one folder

    @property
    def total_bytes(self) -> int:
        """Of all files together."""
        return sum(file.bytes for file in self.files)

    def to_text(self) -> str:
        """The file, its own hash included."""
        document = {"format": FORMAT, "version": SPREAD_VERSION if self.hosts else VERSION, **asdict(self)}
        if not self.hosts:
            del document["hosts"]
        return json.dumps({**document, "sha256": _digest(document)}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_text(text: bytes) -> Manifest:
        """The inverse; raises Unusable where a single character was changed."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise Unusable(f"{MANIFEST_FILE} is not JSON ({error})") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise Unusable(f"{MANIFEST_FILE} is not the manifest of a checkpoint")
        if document.pop("sha256", None) != _digest(document):
            raise Unusable(f"{MANIFEST_FILE} was altered: it does not match its own hash")
        if document["version"] not in (VERSION, SPREAD_VERSION):
            known = f"{VERSION} and {SPREAD_VERSION}"
            raise Unusable(f"it has format version {document['version']}, this coremill reads {known}")
        try:
            manifest = Manifest(
                step=document["step"],
                attempt=document["attempt"],
                world_size=document["world_size"],
                engine=document["engine"],
                parameters={name: tuple(shape) for name, shape in document["parameters"].items()},
                files=tuple(
                    StoredFile(
                        file["name"],
                        file["bytes"],
                        file["sha256"],
                        {name: (start, stop) for name, (start, stop) in file["rows"].items()},
                    )
                    for file in document["files"]
                ),
                versions=document["versions"],
                hosts=dict(document.get("hosts", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unusable(f"{MANIFEST_FILE} lacks something: {error}") from None
        if manifest.to_text().encode() != text:  # a lost line end changes no value, but nobody has it who did not write
            raise Unusable(f"{MANIFEST_FILE} was altered: it is not the text that was written")
        return manifest


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose structure is sound; the bytes of its files are checked by `verify`."""

    folder: Path
    manifest: Manifest
    digest: str = ""  # of the manifest's text: the same in every folder over which one save is spread
    away: Mapping[str, str] = field(default_factory=dict)  # files of a spread one that are not here, and why

    @property
    def step(self) -> int:
        return self.manifest.step

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Hash these files, or all; raises Unusable with the first that is not what was written."""
        wanted = None if names is None else set(names)
        for file in self.manifest.files:
            if wanted is None or file.name in wanted:
                _verify(self.folder / file.name, file)

    def state(self) -> dict[str, Any]:
        """Everything that is not a tensor; the hash is checked on the way."""
        entry = next(file for file in self.manifest.files if file.name == STATE_FILE)
        text = _read(self.folder / STATE_FILE)
        if hashlib.sha256(text).hexdigest() != entry.sha256:
            raise Unusable(f"{STATE_FILE} was altered: its hash is not the manifest's")
        document: dict[str, Any] = json.loads(text)
        return document


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that is not used, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.name} passed over: {self.reason}"


@dataclass(frozen=True)
class Survey:
    """What lies in a folder of checkpoints."""

    sound: tuple[Checkpoint, ...]  # newest first; their files are not hashed yet
    passed_over: tuple[PassedOver, ...]  # newest first


def step_folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def step_folders(folder: Path) -> list[Path]:
    """Folders named like checkpoints, highest step first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = [(int(match.group(1)), name) for name in names if (match := STEP_FOLDER.fullmatch(name))]
    return [folder / name for _, name in sorted(steps, reverse=True)]


def survey(folder: Path) -> Survey:
    """Every checkpoint in the folder: names, sizes, rows and the manifest's own hash, not yet the files' bytes."""
    sound: list[Checkpoint] = []
    passed_over: list[PassedOver] = []
    for path in step_folders(folder):
        try:
            sound.append(open_checkpoint(path))
        except Unusable as error:
            passed_over.append(PassedOver(path.name, str(error)))
    return Survey(tuple(sound), tuple(passed_over))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check all that can be checked without reading the tensors; raises Unusable."""
    try:
        _check_owner(folder)
    except OSError as error:
        raise Unusable(f"it cannot be opened: {error.strerror}") from None
    text = _read(folder / MANIFEST_FILE)
    manifest = Manifest.from_text(text)
    named = STEP_FOLDER.fullmatch(folder.name)
    if named is None or int(named.group(1)) != manifest.step:
        raise Unusable(f"its manifest is of step {manifest.step}: it was put together from different checkpoints")
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names) or STATE_FILE not in names or any(Path(name).name != name for name in names):
        raise Unusable(f"{MANIFEST_FILE} names impossible files")
    away: dict[str, str] = {}
    for file in manifest.files:
        try:
            _check_size(folder / file.name, file)
        except Unusable as error:
            if not manifest.hosts:
                raise
            away[file.name] = f"{error} ({manifest.hosts.get(file.name, 'every host')} wrote it)"
    _check_rows(manifest)
    return Checkpoint(folder, manifest, hashlib.sha256(text).hexdigest(), away)


def refuse_writable_by_others(folder: Path, where: str) -> None:
    """Whoever can write checkpoints decides what is trained: the folder must be ours alone."""
    try:
        _check_owner(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except Unusable as error:
        raise InputError(
            f"the checkpoint folder {folder} is not safe to read from",
            where=where,
            why=str(error),
            do=f"make it yours (chown, chmod go-w {folder}) if you trust what is in it, or set checkpoint.folder",
        ) from None


def _check_owner(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise Unusable("it is not a folder")
    if status.st_uid not in (os.geteuid(), 0):
        raise Unusable(f"it belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise Unusable(f"other users may write into it (mode {stat.S_IMODE(status.st_mode):04o})")


def _check_size(path: Path, file: StoredFile) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise Unusable(f"{file.name} is missing") from None
    except OSError as error:
        raise Unusable(f"{file.name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Unusable(f"{file.name} is not a plain file")
    if status.st_size != file.bytes:
        raise Unusable(f"{file.name} has {status.st_size:,} bytes, {file.bytes:,} were written")


def _check_rows(manifest: Manifest) -> None:
    """Each row of each parameter lies in exactly one file."""
    pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.parameters}
    for file in manifest.files:
        for name, (start, stop) in file.rows.items():
            if name not in pieces:
                raise Unusable(f"{file.name} holds {name}, which the manifest does not list")
            pieces[name].append((start, stop))
    for name, shape in manifest.parameters.items():
        position = 0
        for start, stop in sorted(pieces[name]):
            if start != position or stop < start:
                raise Unusable(f"rows {position} to {start} of {name} are in no file, or in two")
            position = stop
        if position != (shape[0] if shape else 1):
            raise Unusable(f"rows from {position} on of {name} are in no file")


def _verify(path: Path, file: StoredFile) -> None:
    _check_size(path, file)
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as stream:
            while piece := stream.read(READ_BYTES):
                digest.update(piece)
                HEARTBEAT.advance(len(piece))
    except OSError as error:
        raise Unusable(f"{file.name} cannot be read: {error.strerror}") from None
    if digest.hexdigest() != file.sha256:
        raise Unusable(f"{file.name} was altered: its hash is not the manifest's")


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise Unusable(f"{path.name} is far too large")
        return path.read_bytes()
    except FileNotFoundError:
        raise Unusable(f"{path.name} is missing: it was never completed") from None
    except OSError as error:
        raise Unusable(f"{path.name} cannot be read: {error.strerror}") from None


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
