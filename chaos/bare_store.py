"""A run reduced to its saves: forked processes as ranks, a few megabytes each, the real store, no torch.

Two hundred kills inside a save cost seconds here and an hour with real ranks; what is killed is the same code. Ranks
tell rank 0 through pipes what they wrote, as real ones do through their store. `python -m chaos.bare_store FOLDER`
makes one save with two ranks, for a look from outside.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from coremill.checkpoint.manifest import Checkpoint, Manifest, StoredFile
from coremill.checkpoint.resume import ResumePoint, find_resume_point
from coremill.checkpoint.store import Store, StoredTensor

RANKS, KEEP = 2, 2
COLUMNS = 1024
# Of one rank. Larger than one piece of the store, so that a file is several writes.
DEFAULT_BYTES = 5 * 2**19
# Every call with which a save changes something on disk.
CHANGING_CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir", "chmod")


def file_name(rank: int) -> str:
    """As docs/decisions/checkpoints.md has it."""
    return f"rank-{rank:05d}-of-{RANKS:05d}.safetensors"


@dataclass(frozen=True)
class Shape:
    """How large a checkpoint is."""

    bytes_per_rank: int = DEFAULT_BYTES

    @property
    def rows_per_rank(self) -> int:
        """Of the one parameter there is."""
        return max(1, self.bytes_per_rank // (4 * COLUMNS))


def weights(step: int, rank: int, shape: Shape) -> np.ndarray:
    """What step `step` leaves on a rank: different in every element from any other step and rank."""
    count = shape.rows_per_rank * COLUMNS
    return (np.arange(count, dtype=np.float32) % 1021 + 7919 * step + 131 * rank).reshape(-1, COLUMNS)


def make_store(folder: Path, attempt: str) -> Store:
    """As a new attempt of a run finds it."""
    store = Store(folder, attempt)
    store.make()
    store.sweep()
    return store


def write_part(store: Store, step: int, number: int, rank: int, shape: Shape) -> StoredFile:
    """What every rank does in a save."""
    partial = store.begin(step, number)
    part = weights(step, rank, shape)
    tensor = StoredTensor("parameters/w", "F32", part.shape, memoryview(part).cast("B"))
    rows = (rank * shape.rows_per_rank, (rank + 1) * shape.rows_per_rank)
    return store.write_tensors(partial / file_name(rank), [tensor], {"w": rows})


def commit(store: Store, step: int, number: int, files: list[StoredFile], shape: Shape) -> None:
    """What rank 0 does when all have reported."""
    manifest = Manifest(
        step=step,
        attempt=store.attempt,
        world_size=RANKS,
        engine="shard",
        parameters={"w": (RANKS * shape.rows_per_rank, COLUMNS)},
        files=tuple(files),
        versions={"coremill": "chaos"},
    )
    store.commit(store.partial(step, number), manifest, {"step": step})
    store.prune(KEEP)


def save(store: Store, step: int, number: int = 1, shape: Shape = Shape()) -> None:  # noqa: B008 - frozen
    """A whole save, rank after rank, in this process."""
    commit(store, step, number, [write_part(store, step, number, rank, shape) for rank in range(RANKS)], shape)


def start_save(
    store: Store, step: int, shape: Shape, hooks: dict[int, Callable[[], None]] | None = None
) -> dict[int, int]:
    """The same with a process for each rank; returns their process ids. `hooks` run first, in the rank they are for."""
    reader, writer = os.pipe()
    pids: dict[int, int] = {}
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(writer if rank == 0 else reader)
                (hooks or {}).get(rank, lambda: None)()
                _be_rank(store, step, rank, shape, reader if rank == 0 else writer)
            except BaseException:
                os._exit(1)
            os._exit(0)
        pids[rank] = pid
    os.close(reader)
    os.close(writer)
    return pids


def _be_rank(store: Store, step: int, rank: int, shape: Shape, pipe: int) -> None:
    file = write_part(store, step, 1, rank, shape)
    if rank != 0:
        os.write(pipe, json.dumps(asdict(file)).encode() + b"\n")
        return
    with os.fdopen(pipe, "rb") as reports:
        others = [StoredFile(**json.loads(line)) for line in reports]
    if len(others) == RANKS - 1:  # a rank that died reports nothing
        commit(store, step, 1, [file, *others], shape)


def die_at_call(moment: int | None, counter: mmap.mmap) -> None:
    """Count the calls that change something on disk, where the parent sees it; die right before call `moment`."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            count = int.from_bytes(counter[:4], "little") + 1
            counter[:4] = count.to_bytes(4, "little")
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    for name in CHANGING_CALLS:
        setattr(os, name, counted(getattr(os, name)))


class Heard:
    """An event sink."""

    def __init__(self) -> None:
        self.passed_over: list[dict[str, Any]] = []

    def write(self, kind: str, /, **fields: Any) -> None:
        """Keep what was passed over."""
        if kind == "passed_over":
            self.passed_over.append(fields)


def resume(folder: Path) -> tuple[ResumePoint, list[dict[str, Any]]]:
    """What a run of one rank would go on from, and what it passes over: the real decision, every hash checked."""
    alone: Any = SimpleNamespace(
        rank=0, size=1, nodes=1, hostnames=("here",), broadcast=lambda value: value, gather=lambda value: [value]
    )
    heard = Heard()
    return find_resume_point(folder, alone, heard), heard.passed_over


def holds_its_step(checkpoint: Checkpoint, shape: Shape) -> bool:
    """Whether the tensors are those of the step the checkpoint says it is; read with the stock reader."""
    from safetensors.numpy import load_file

    return all(
        np.array_equal(
            load_file(checkpoint.folder / file_name(rank))["parameters/w"],
            weights(checkpoint.step, rank, shape),
        )
        for rank in range(RANKS)
    )


if __name__ == "__main__":
    here = make_store(Path(sys.argv[1]), sys.argv[2])
    for pid in start_save(here, int(sys.argv[3]), Shape()).values():
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)
