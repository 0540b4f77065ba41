"""What a run says while it runs: one append-only JSONL file per rank, and the readers of those files.

A rank writes raw numbers in plain units and knows nothing of screens or pages; console, summary and page only read.
Each event is one `write` system call on a file opened for appending, so a kill at any moment leaves at most one torn
line, the last one. Readers pass torn lines over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from coremill.errors import InputError, StorageError
from coremill.redaction import redact

RUNS_NAMED = 8  # of a folder that holds many
EVENTS_FOLDER = "events"
FULL = (errno.ENOSPC, errno.EDQUOT)
WAITING_BYTES = 16 * 2**20  # some 40,000 steps
HEAD_BYTES = 256  # with the time of the first event: what tells a file from another of its name


@dataclass(frozen=True)
class Event:
    """One line of one rank: when, who, what kind, and the fields of that kind."""

    kind: str
    time: float  # unix seconds
    rank: int
    fields: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or the default where the writer left it out."""
        return self.fields.get(name, default)

    def number(self, name: str) -> float:
        """A numeric field; 0 where the writer left it out."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, int | float) else 0.0


def not_a_run(folder: Path) -> InputError:
    """Of a folder that holds no run; one that holds runs names them, the latest first."""
    what, why = f"{folder} is not a run folder", "it holds neither plan.json nor events/"
    inside = _runs_in(folder)
    if not inside:
        return InputError(what, why=why, do="name the folder a run left")
    named = _named(inside)
    why = f"it holds {'a run' if len(inside) == 1 else f'{len(inside)} runs'}"
    several = "" if len(inside) == 1 else "; several are compared"
    return InputError(what, why=why, do=f"name {'it' if len(inside) == 1 else 'one of them'}: {named}{several}")


def no_such_run(folder: Path) -> InputError:
    """Of a folder that is not there; runs beside it, else those in runs/, are named."""
    what, do = f"no such run folder: {folder}", "name the folder a run left, for example runs/built-in"
    for beside in (folder.parent, Path("runs")):
        if inside := _runs_in(beside):
            return InputError(
                what, why=f"{beside}/ holds {_named([run.name for run in inside])}", do=do.partition(",")[0]
            )
    return InputError(what, do=do)


def _runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, the latest first."""
    inside = [file.parent for file in folder.glob("*/plan.json")]
    return sorted(inside, key=lambda run: (run / "plan.json").stat().st_mtime, reverse=True)


def _named(runs: Sequence[Path | str]) -> str:
    more = f" and {len(runs) - RUNS_NAMED} more" if len(runs) > RUNS_NAMED else ""
    return f"{', '.join(str(run) for run in runs[:RUNS_NAMED])}{more}"


def events_folder(run_folder: Path | str) -> Path:
    """Where the events of a run lie."""
    return Path(run_folder) / EVENTS_FOLDER


def event_file(run_folder: Path | str, rank: int) -> Path:
    """The file of one rank."""
    return events_folder(run_folder) / f"rank-{rank:05d}.jsonl"


def reset_events(run_folder: Path | str) -> None:
    """Remove the files of an earlier attempt; the caller does it once, before any rank starts."""
    for path in _event_files(run_folder):
        path.unlink(missing_ok=True)


class EventWriter:
    """Appends the events of one rank; also used by the launcher to say what became of a rank that was killed."""

    def __init__(self, run_folder: Path | str, rank: int) -> None:
        self.rank = rank
        self.path = event_file(run_folder, rank)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _storage_error(self.path, error) from error
        self._lock = threading.Lock()
        self._waiting = bytearray()  # what a full disk has not taken yet
        self._end_torn_line()

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one event, stamped with the time of now.

        JSON has no NaN: a non-finite float becomes null, and `non_finite` names it, so the line stays valid for any
        reader and `read_events` can give the number back.
        """
        non_finite: dict[str, str] = {}
        document: dict[str, Any] = {"kind": kind, "time": time.time(), "rank": self.rank}
        document |= {name: _plain(value, name, non_finite) for name, value in fields.items()}
        if non_finite:
            document["non_finite"] = non_finite
        self._append(json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._descriptor >= 0:
            if self._waiting:
                with contextlib.suppress(StorageError):
                    self._append("")  # there may be room by now
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: str) -> None:
        """A full disk ends no run: lines wait in memory, the oldest are let go, and follow once there is room."""
        with self._lock:  # a save says in its own thread how it ended
            data = bytes(self._waiting) + line.encode("utf-8", errors="replace")
            self._waiting.clear()
            written = 0
            try:
                while written < len(data):  # one call in practice; a regular file takes less only when the disk is full
                    written += os.write(self._descriptor, memoryview(data)[written:])
            except OSError as error:
                if error.errno not in FULL:
                    raise _storage_error(self.path, error) from error
                self._waiting += data[written:]
                if len(self._waiting) > WAITING_BYTES:
                    # Up to a line end, which stays: it closes the line that may lie half-written in the file.
                    del self._waiting[: self._waiting.index(b"\n", len(self._waiting) - WAITING_BYTES)]

    def _end_torn_line(self) -> None:
        """A killed predecessor may have left half a line; what follows must not be glued to it."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._append("\n")


def iter_events(run_folder: Path | str) -> Iterator[Event]:
    """All events, file by file in rank order, each file in the order it was written; holds one line at a time."""
    for path in _event_files(run_folder):
        with path.open("rb") as lines:
            for line in lines:
                if (event := _parse(line)) is not None:
                    yield event


def read_events(run_folder: Path | str) -> list[Event]:
    """All events of a run so far, by time; torn lines are passed over."""
    return sorted(iter_events(run_folder), key=_by_time)


@dataclass
class _Position:
    """How far one file has been read, and what it begins with: a file made anew may get the inode of the former one."""

    inode: int
    offset: int = 0
    head: bytes = b""


@dataclass
class EventFollower:
    """Reads what was appended since the last look; files of ranks that start later are picked up when they appear."""

    run_folder: Path
    since: float = 0.0  # unix seconds; what was said before, by an earlier attempt, is passed over
    most_bytes: int | None = None  # of a file at one look; None: all there is
    ranks: range | None = None  # whose files are read; None: all
    begun_anew: bool = False  # a file that was read before is another one now, or gone: what it said is void
    _positions: dict[Path, _Position] = field(default_factory=dict)

    def poll(self) -> list[Event]:
        """New whole lines of all ranks, by time."""
        files = _event_files(self.run_folder)
        if self.ranks is not None:
            wanted = {event_file(self.run_folder, rank) for rank in self.ranks}
            files = [file for file in files if file in wanted]
        self.begun_anew = self.begun_anew or bool(self._positions.keys() - set(files))
        events = [event for path in files for event in self._read_new(path)]
        return sorted((event for event in events if event.time >= self.since), key=_by_time)

    def _read_new(self, path: Path) -> Iterator[Event]:
        position = self._positions.get(path)
        try:
            status = path.stat()
            if position is not None and (status.st_ino, status.st_size) == (position.inode, position.offset):
                return
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_same = position is not None and (
                    status.st_ino == position.inode
                    and status.st_size >= position.offset
                    and file.read(len(position.head)) == position.head
                )
                if position is None or not is_same:
                    self.begun_anew = self.begun_anew or position is not None
                    position = self._positions[path] = _Position(status.st_ino)  # new, or a new attempt began
                file.seek(position.offset)
                data = file.read(-1 if self.most_bytes is None else self.most_bytes)
                if b"\n" not in data:
                    data += file.read()  # one line longer than that
        except OSError:  # gone again, or its storage is away for a moment: the other files are read all the same
            return
        whole = data[: data.rfind(b"\n") + 1]  # a line still being written is left for the next look
        position.head = position.head or whole[:HEAD_BYTES]
        position.offset += len(whole)
        for line in whole.splitlines():
            if (event := _parse(line)) is not None:
                yield event


def _event_files(run_folder: Path | str) -> list[Path]:
    return sorted(events_folder(run_folder).glob("rank-*.jsonl"))


def _by_time(event: Event) -> tuple[float, int]:
    return event.time, event.rank


def _parse(line: bytes) -> Event | None:
    """The event on this line; None for a torn or foreign line."""
    if not line.strip():
        return None
    try:
        document = json.loads(line)
        kind, moment, rank = document.pop("kind"), float(document.pop("time")), int(document.pop("rank"))
        non_finite = document.pop("non_finite", {})
        document |= {name: float(text) for name, text in non_finite.items() if name in document}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Event(str(kind), moment, rank, document)


def _plain(value: Any, name: str, non_finite: dict[str, str]) -> Any:
    """The value as JSON can hold it, redacted; numbers of numpy and the like go through `item()`."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        non_finite[name] = str(float(value))
        return None
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [_plain(item, f"{name}.{index}", non_finite) for index, item in enumerate(value)]
    if getattr(value, "shape", None) == () or getattr(value, "ndim", None) == 0:
        return _plain(value.item(), name, non_finite)
    return redact(str(value))


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write the events of this rank: {error.strerror or error}",
        where=str(path),
        do="free space, or name another folder with --set run.folder=...",
    )
