"""One run, one owner: while a run goes on, the process that leads it holds its folder and its checkpoint folder.

Where a file system may be shared by hosts, a thread renews both. A holder that was taken over meanwhile, for it had
been suspended for long, finds out with `check`, and ends.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from coremill.errors import InputError
from coremill.world.folder_lock import (
    ENDING_SECONDS,
    LOCK_FILE,
    STALE_SECONDS,
    Busy,
    FolderLock,
    Holder,
    Say,
    wait_for_own,
)
from coremill.world.identity import NodeIdentity

RENEW_SECONDS = 3.0
# Where a head connects anew: it may notice a cut before the host does, which waits for SILENCE_SECONDS
# (hosts/host_restarts.py).
RECONNECT_SECONDS = 60.0
LATER_SECONDS = 10.0  # other nodes speak after the first one, which speaks for all


class FolderTaken(InputError):
    """Another run has a folder of this one."""


class OwnedFolders:
    """The folders of the run that this process leads, and the thread that renews them."""

    def __init__(self) -> None:
        self._locks: list[FolderLock] = []
        self._lost: tuple[Path, Holder] | None = None
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def take(
        self,
        run: Path,
        checkpoints: Path,
        *,
        where_run: str,
        where_checkpoints: str,
        say: Say,
        meeting: str = "",
        patience_seconds: float = ENDING_SECONDS,
    ) -> None:
        """Both folders, or a FolderTaken that names who has one."""

        def take_one(folder: Path, mode: int | None) -> None:
            try:
                lock = FolderLock(folder, run, meeting, say=say, mode=mode, patience_seconds=patience_seconds)
                self._locks.append(lock)
            except OSError as error:  # where nothing can be written, that is refused in a moment
                say(f"{folder} cannot be held ({error.strerror}): a second run in it would not be noticed")
                return
            if lock.is_shared and self._thread is None:
                self._thread = threading.Thread(target=self._renew, args=(self._ends,), name="run-lock", daemon=True)
                self._thread.start()

        try:
            take_one(run, None)
        except Busy as busy:
            raise _refusal(run, busy, where_run) from None
        if checkpoints.resolve() == run.resolve():
            return
        try:
            take_one(checkpoints, 0o755)
        except Busy as busy:
            self.release()
            whose = "another run" if busy.holder is None else f"the run in {busy.holder.run}"
            raise FolderTaken(
                f"{checkpoints} is in use by {whose}: {_named(busy.holder)}",
                where=where_checkpoints,
                why="two runs in one checkpoint folder remove each other's checkpoints",
                do="set checkpoint.folder to another folder, or let that run end" + _last_resort(busy, checkpoints),
            ) from None

    def check(self) -> None:
        """Raise where another process took a folder over while this one was suspended or cut off."""
        if self._lost is not None:
            folder, holder = self._lost
            raise FolderTaken(
                f"{folder} was taken over by another run: {holder.words}",
                why=f"this process gave no sign of life for {STALE_SECONDS:.0f} s or more,"
                " or both were started at the same moment",
                do="let that run end; the same command then goes on from its newest checkpoint",
            )

    def check_now(self) -> None:
        """The same by a look at the folders, before something is written there: the thread may have been suspended."""
        self._look()
        self.check()

    def release(self) -> None:
        """Let all go; further calls do nothing."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(timeout=1)  # it may hang in storage that is away
        while self._locks:
            self._locks.pop().release()
        self._ends, self._thread, self._lost = threading.Event(), None, None

    def abandon(self) -> None:
        """Let the end of the process free them: storage that hangs would hold it up."""
        self._locks.clear()

    def _renew(self, ends: threading.Event) -> None:
        while not ends.wait(RENEW_SECONDS):
            self._look()

    def _look(self) -> None:
        for lock in [lock for lock in self._locks if lock.is_shared]:
            other = lock.renew()
            if other is not None:
                self._lost = (lock.path.parent, other)


OWNED = OwnedFolders()


def own_or_join(
    run: Path,
    checkpoints: Path,
    node: NodeIdentity | None,
    *,
    has_head: bool,
    where_run: str,
    where_checkpoints: str,
    say: Say,
) -> None:
    """As the first node hold the folders of the run from here on; as any node, 78 where another run has them."""
    meeting = "" if node is None else f"{node.master_address}:{node.master_port}"
    patience_seconds = RECONNECT_SECONDS if has_head else ENDING_SECONDS
    if node is not None and node.node_rank != 0:
        join_run(run, meeting, where_run=where_run, say=say, patience_seconds=patience_seconds + LATER_SECONDS)
        return
    OWNED.take(
        run,
        checkpoints,
        where_run=where_run,
        where_checkpoints=where_checkpoints,
        say=say,
        meeting=meeting,
        patience_seconds=patience_seconds,
    )


def join_run(run: Path, meeting: str, *, where_run: str, say: Say, patience_seconds: float) -> None:
    """As another node than the first: a FolderTaken where the folder that it sees is that of another run."""
    with contextlib.suppress(OSError):
        try:
            wait_for_own(run, meeting, say=say, patience_seconds=patience_seconds)
        except Busy as busy:
            raise _refusal(run, busy, where_run) from None


def _refusal(run: Path, busy: Busy, where: str) -> FolderTaken:
    return FolderTaken(
        f"{run} is the folder of a run that is going on: {_named(busy.holder)}",
        where=where,
        why="a second one would write over its events, its checkpoints and its export",
        do=f"let it end, end it with coremill stop {run}, or set run.folder to another folder{_last_resort(busy, run)}",
    )


def _last_resort(busy: Busy, folder: Path) -> str:
    """For a holder elsewhere: of one on this machine it is known that it lives."""
    if busy.holder is not None and busy.holder.is_on_this_machine:
        return ""
    return f"; where that host is gone for good, remove {folder / LOCK_FILE}"


def _named(holder: Holder | None) -> str:
    return "it has not said yet who it is" if holder is None else holder.words
