"""Where a run goes on: all ranks agree on the newest checkpoint whose every byte is what was written.

Rank 0 lists them; the ranks share the hashing, each file once; one bad file, or one rank that cannot read it, and all
turn to the checkpoint before it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coremill.checkpoint.manifest import STATE_FILE, Checkpoint, PassedOver, Unusable, open_checkpoint, survey
from coremill.checkpoint.store import Store
from coremill.errors import InputError
from coremill.world import World


class EventSink(Protocol):
    """Where a rank says what it finds and does."""

    def write(self, kind: str, /, **fields: Any) -> None:
        """One event."""


@dataclass(frozen=True)
class Origin:
    """Where this attempt begins."""

    store: Store
    checkpoint: Checkpoint | None  # None: at the start
    bad: frozenset[str]  # names of checkpoints that were passed over
    unsaved_because: str | None  # why nothing can be saved at all; None: it can

    @property
    def step(self) -> int:
        """The last step that is done."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def find_origin(folder: Path, world: World, events: EventSink, *, saving: bool = True) -> Origin:
    """Agree on the checkpoint to go on from; each one that is passed over becomes an event, and so does the choice.

    Where the run is `saving`, a folder that cannot be used is refused before the first step, on all ranks together.
    """
    store = Store(folder, world.broadcast(uuid.uuid4().hex[:12]))
    problem = None
    if world.rank == 0:
        try:
            store.make()
            store.sweep()
        except OSError as error:
            problem = f"{folder} cannot be written: {error.strerror or error}"
    problem = world.broadcast(problem) or (_not_shared(store, world) if world.nodes > 1 else None)
    if problem:
        if saving:
            refusal = InputError(
                f"nothing could be saved: {problem}",
                where="checkpoint.folder",
                why="a run that cannot save loses everything with its first fault",
                do="set checkpoint.folder to a folder that every host sees and this user may write; or go without: "
                "--set checkpoint.every=never",
            )
            refusal.silent = world.rank != 0
            raise refusal
        return Origin(store, None, frozenset(), problem)
    names, passed_over = world.broadcast(_listed(folder) if world.rank == 0 else None)
    bad = {name for name, _ in passed_over}
    for name, reason in passed_over:
        _tell(PassedOver(name, reason), events)
    for name in names:
        checkpoint, failure = _verified_share(folder / name, world)
        failures = [each for each in world.gather(failure) if each]
        if not failures and checkpoint is not None:
            text = f"every file of checkpoint {name} is as it was written: the run goes on after step {checkpoint.step}"
            events.write("resume", step=checkpoint.step, checkpoint=name, world_size=world.size, text=text)
            return Origin(store, checkpoint, frozenset(bad), None)
        bad.add(name)
        _tell(PassedOver(name, failures[0]), events)
    return Origin(store, None, frozenset(bad), None)


def _tell(passed: PassedOver, events: EventSink) -> None:
    events.write("passed_over", checkpoint=passed.name, reason=passed.reason, text=str(passed))


def _listed(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    found = survey(folder)
    return [each.folder.name for each in found.sound], [(each.name, each.reason) for each in found.passed_over]


def _verified_share(folder: Path, world: World) -> tuple[Checkpoint | None, str | None]:
    """Hash every size-th file, and the small state file everywhere; a reason where something is wrong."""
    try:
        checkpoint = open_checkpoint(folder)
        names = sorted(file.name for file in checkpoint.manifest.files)
        checkpoint.verify({*names[world.rank :: world.size], STATE_FILE})
    except Unusable as error:
        return None, str(error)
    return checkpoint, None


def _not_shared(store: Store, world: World) -> str | None:
    """Several hosts need one folder; each looks for what rank 0 has just put there."""
    token = store.folder / f".seen-{store.attempt}"
    if world.rank == 0:
        token.touch()
    world.barrier()
    seen = world.gather(token.exists())
    if world.rank == 0:
        token.unlink(missing_ok=True)
    blind = sorted({world.hostnames[rank] for rank, sees in enumerate(seen) if not sees})
    if not blind:
        return None
    return f"{store.folder} is not shared by all hosts: {', '.join(blind)} cannot see it"
