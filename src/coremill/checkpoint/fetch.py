"""Brings files of a checkpoint from hosts that have them to hosts that lack them, over the ranks' own connections.

With other ranks than it was saved by, with hosts that changed their order, or where every rank needs every row
(replicate), a place lacks files that others have. They come in pieces, are hashed on the way to the disk and compared
with the manifest, and lie in a hidden folder beside links to what was there, until the state is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coremill.checkpoint.agreement import Whole
from coremill.checkpoint.manifest import MANIFEST_FILE, STATE_FILE, Checkpoint, Manifest, StoredFile, Unusable
from coremill.checkpoint.places import Places
from coremill.checkpoint.store import FETCHED_PREFIX, FirstFailure, HashedFile, Store
from coremill.errors import StorageError
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT
from coremill.world.lost_peers import peer_errors

PIECE_BYTES = 4 * 2**20

Needs = Callable[[Manifest], Iterable[str]]  # the files this rank will read


@dataclass(frozen=True)
class Transfer:
    """One file on its way."""

    file: StoredFile
    source: int
    target: int  # ranks


def all_files(manifest: Manifest) -> list[str]:
    """For ranks that do not say what they need."""
    return [file.name for file in manifest.files]


def assemble(
    store: Store, whole: Whole, mine: Checkpoint | None, needs: Needs, world: World, places: Places
) -> tuple[Checkpoint, Path | None]:
    """The checkpoint as this rank can read it, and the folder that was made for it; None: it lay there already.

    `mine` is what lies in this rank's place, None for nothing. Every rank calls it, and all raise alike: Unusable where
    a file could not be had, StorageError where one could not be stored.
    """
    has_all = world.gather(mine is not None and places.mine in whole.holders[STATE_FILE])
    if all(has_all):
        assert mine is not None
        manifest_text, state_text, manifest = b"", b"", mine.manifest
    else:
        source = whole.holders[STATE_FILE][0]
        texts = None
        if world.rank == source:
            assert mine is not None
            texts = [(mine.folder / name).read_text() for name in (MANIFEST_FILE, STATE_FILE)]
        manifest_text, state_text = (text.encode() for text in world.broadcast(texts, source=source))
        if hashlib.sha256(manifest_text).hexdigest() != whole.digest:
            raise Unusable(f"{MANIFEST_FILE} changed while it was read")
        manifest = Manifest.from_text(manifest_text)
    wanted = world.gather(sorted(set(needs(manifest))))
    lacking = {
        place: sorted(
            {file for rank in places.ranks_of(place) for file in wanted[rank] if place not in whole.holders[file]}
            - {STATE_FILE}
        )
        for place in places.leaders
    }
    incomplete = [place for place in places.leaders if lacking[place] or not has_all[place]]
    if not incomplete:
        assert mine is not None
        return mine, None
    folder = store.folder / f"{FETCHED_PREFIX}{whole.name}-{store.attempt}"
    problem = None
    if places.leads and world.rank in incomplete:
        texts_here = None if has_all[world.rank] else (manifest_text, state_text)
        problem = _prepare(folder, whole, mine, texts_here, places.mine)
    problems = world.gather(problem)
    if not any(problems):
        listed = {file.name: file for file in manifest.files}
        transfers = plan_transfers(lacking, whole, listed, places)
        mine_bytes = sum(each.file.bytes for each in transfers if world.rank in (each.source, each.target))
        with HEARTBEAT.work("fetching the checkpoint from other hosts", mine_bytes):
            for transfer in transfers:
                problem = _take_part(transfer, whole, folder, store, world) or problem
        problems = world.gather(problem)
    _raise_alike(problems, folder, places, world)
    if places.mine in incomplete:
        return Checkpoint(folder, manifest, whole.digest), folder
    assert mine is not None
    return mine, None


def plan_transfers(
    lacking: Mapping[int, Sequence[str]], whole: Whole, files: Mapping[str, StoredFile], places: Places
) -> list[Transfer]:
    """The same list on every rank, which all go through in this order: so nobody waits for one who waits for him.

    Pairs of places take turns by distance, so that many are busy at once; in a place its ranks take turns.
    """
    order = {place: index for index, place in enumerate(places.leaders)}
    found: list[tuple[int, int, Transfer]] = []
    for target, names in lacking.items():
        for index, name in enumerate(names):
            holders = whole.holders[name]
            source = holders[order[target] % len(holders)]
            senders, takers = places.ranks_of(source), places.ranks_of(target)
            transfer = Transfer(files[name], senders[index % len(senders)], takers[index % len(takers)])
            found.append(((order[target] - order[source]) % len(order), order[source], transfer))
    return [transfer for _, _, transfer in sorted(found, key=lambda each: each[:2])]


def _prepare(
    folder: Path, whole: Whole, mine: Checkpoint | None, texts: tuple[bytes, bytes] | None, place: int
) -> str | None:
    """A folder with what is here already; a reason where the disk does not take it."""
    try:
        folder.mkdir(mode=0o755)
        if texts is not None:
            for name, text in zip((MANIFEST_FILE, STATE_FILE), texts, strict=True):
                (folder / name).write_bytes(text)
        if mine is not None:
            here = [file for file, holders in whole.holders.items() if place in holders]
            for name in {MANIFEST_FILE, *here} - ({MANIFEST_FILE, STATE_FILE} if texts is not None else set()):
                (folder / name).symlink_to(mine.folder / name)
    except OSError as error:
        return f"storage: {error.strerror or error}"
    return None


def _take_part(transfer: Transfer, whole: Whole, folder: Path, store: Store, world: World) -> str | None:
    """Send, take, or do nothing; a reason where it went wrong here. The other end is never left waiting."""
    if world.rank == transfer.source:
        return _send(store.folder / whole.name / transfer.file.name, transfer)
    if world.rank == transfer.target:
        return _take(folder / transfer.file.name, transfer)
    return None


def _send(path: Path, transfer: Transfer) -> str | None:
    """What cannot be read is sent as zeros: the hash tells at the other end."""
    import torch
    import torch.distributed as dist

    problem, stream = None, None
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(path.open("rb", buffering=0))
        except OSError as error:
            problem = f"{path.name} cannot be read: {error.strerror}"
        for start in range(0, transfer.file.bytes, PIECE_BYTES):
            piece = bytearray(min(PIECE_BYTES, transfer.file.bytes - start))
            try:
                if stream is not None and problem is None:
                    os.preadv(stream.fileno(), [piece], start)
            except OSError as error:
                problem = f"{path.name} cannot be read: {error.strerror}"
            with peer_errors():
                dist.send(torch.frombuffer(piece, dtype=torch.uint8), transfer.target)
            HEARTBEAT.advance(len(piece))
    return problem


def _take(path: Path, transfer: Transfer) -> str | None:
    import torch
    import torch.distributed as dist

    disk, file = FirstFailure(), HashedFile(path)
    disk.attempt(file.open)
    for start in range(0, transfer.file.bytes, PIECE_BYTES):
        piece = torch.empty(min(PIECE_BYTES, transfer.file.bytes - start), dtype=torch.uint8)
        with peer_errors():
            dist.recv(piece, transfer.source)
        disk.attempt(file.write, piece.numpy().data)
        HEARTBEAT.advance(piece.numel())
    disk.attempt(file.sync)
    try:
        file.close()
    except OSError as error:  # NFS may tell of a full disk only now
        disk.error = disk.error or error
    if disk.error is not None:
        return f"storage: {disk.error.strerror or disk.error}"
    is_right = file.digest.hexdigest() == transfer.file.sha256
    return None if is_right else f"{path.name} did not arrive as it was written"


def _raise_alike(problems: Sequence[str | None], folder: Path, places: Places, world: World) -> None:
    """Full disks and lost files end differently: for the first the step before would fare no better."""
    told = [(rank, problem) for rank, problem in enumerate(problems) if problem]
    if not told:
        return
    if places.leads:
        shutil.rmtree(folder, ignore_errors=True)
    full = [(rank, problem) for rank, problem in told if problem.startswith("storage: ")]
    if full:
        rank, problem = full[0]
        error = StorageError(
            f"what other hosts saved cannot be brought to {world.hostnames[rank]}: {problem.removeprefix('storage: ')}",
            where=str(folder.parent),
            do="free space there, or set checkpoint.folder to a folder that every host sees, with all files in it",
        )
        error.silent = world.rank != 0
        raise error
    rank, problem = told[0]
    raise Unusable(f"on {world.hostnames[rank]}: {problem}")
