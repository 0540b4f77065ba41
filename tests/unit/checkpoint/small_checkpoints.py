"""Checkpoints of a few hundred bytes, made with the real store and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coremill.checkpoint.manifest import Checkpoint, Manifest
from coremill.checkpoint.store import Store, StoredTensor, sealed

ROWS, COLUMNS, RANKS = 6, 5, 2


def weights(step: int) -> np.ndarray:
    """What step `step` leaves."""
    return (np.arange(ROWS * COLUMNS, dtype=np.float32) + 1000 * step).reshape(ROWS, COLUMNS)


def save(store: Store, step: int, *, number: int = 1, keep: int = 2, **state: Any) -> Checkpoint:
    """What a run of two ranks does, one after the other; `state` is what it keeps besides tensors."""
    partial = store.begin(step, number)
    files = []
    for rank in range(RANKS):
        rows = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
        part = np.ascontiguousarray(weights(step)[rows])
        tensor = StoredTensor("parameters/w", "F32", part.shape, memoryview(part).cast("B"))
        path = partial / f"rank-{rank:05d}-of-{RANKS:05d}.safetensors"
        files.append(store.write_tensors(path, [tensor], {"w": (rows.start, rows.stop)}))
    manifest = Manifest(
        step=step,
        attempt=store.attempt,
        world_size=RANKS,
        engine="shard",
        parameters={"w": (ROWS, COLUMNS)},
        files=tuple(files),
        versions={"coremill": "test"},
    )
    checkpoint = store.commit(partial, manifest, {"step": step, "loader": {"epoch": 0, "position": 8 * step}, **state})
    store.prune(keep)
    return checkpoint


def make_store(folder: Path, attempt: str = "a1") -> Store:
    store = Store(folder / "checkpoints", attempt)
    store.make()
    return store


def save_spread(folder: Path, step: int) -> list[Store]:
    """The same by two ranks whose hosts share no folder: one store each."""
    whole = save(make_store(folder / "together"), step)
    files = whole.manifest.files[:-1]
    hosts = {file.name: f"host-{index}" for index, file in enumerate(files)}
    _, text, state = sealed(Manifest(**{**vars(whole.manifest), "files": files, "hosts": hosts}), whole.state())
    stores = []
    for name, host in hosts.items():
        store = make_store(folder / host)
        partial = store.begin(step, 1)
        (partial / name).write_bytes((whole.folder / name).read_bytes())
        store.put(partial, step, text, state)
        stores.append(store)
    return stores
