"""Where a run goes on: all ranks agree on the newest checkpoint whose every byte is what was written.

Where hosts share no folder, each place (places.py) lists what it has; a step counts where every file of one save lies
somewhere (agreement.py), and what a place lacks of it is brought there (fetch.py). The ranks share the hashing, each
file once; one that is bad everywhere, or cannot be read, and all turn to the checkpoint before it.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coremill.checkpoint.agreement import JointSurvey, Whole, join_views, view_of
from coremill.checkpoint.fetch import Needs, all_files, assemble
from coremill.checkpoint.manifest import (
    STATE_FILE,
    Checkpoint,
    PassedOver,
    Unusable,
    open_checkpoint,
    step_folder_name,
    step_of,
    survey,
)
from coremill.checkpoint.places import NoPlace, Places, find_places
from coremill.checkpoint.store import GO_ON_FROM, START_ANEW, Store
from coremill.errors import InputError, StorageError
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT

if TYPE_CHECKING:
    from coremill.train.numerics import EventSink


@dataclass(frozen=True)
class ResumePoint:
    """Where this attempt begins."""

    store: Store
    checkpoint: Checkpoint | None  # None: at the start
    bad: frozenset[str]  # names of checkpoints that were passed over
    unsaved_because: str | None  # why nothing can be saved at all; None: it can
    places: Places
    fetched: Path | None = None  # made for this resume: what other hosts had

    @property
    def step(self) -> int:
        """The last step that is done."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def remove_fetched(self) -> None:
        """Once all ranks have read the checkpoint: what was brought from other hosts goes."""
        if self.fetched is not None and self.places.leads:
            shutil.rmtree(self.fetched, ignore_errors=True)


def find_resume_point(
    folder: Path, world: World, events: EventSink, *, saving: bool = True, needs: Needs = all_files
) -> ResumePoint:
    """Agree on the checkpoint to go on from; each one that is passed over becomes an event, and so does the choice.

    Where the run is `saving`, a folder that cannot be used is refused before the first step, on all ranks together.
    `needs` says which files this rank will read. Where `train --from` named a step, it is that one or none.
    """
    store = Store(folder, world.broadcast(uuid.uuid4().hex[:12]))
    try:
        places = _open_places(store, world)
    except NoPlace as error:
        if saving:
            refusal = InputError(
                f"nothing could be saved: {error}",
                where="checkpoint.folder",
                why="a run that cannot save loses everything with its first fault",
                do="set checkpoint.folder to a folder that this user may write on every host; or go without: "
                "--set checkpoint.every=never",
            )
            refusal.silent = world.rank != 0
            raise refusal from None
        alone = Places((0,) * world.size, world.hostnames, world.rank)
        return ResumePoint(store, None, frozenset(), str(error), alone)
    if world.nodes > 1:
        choice = places.choice()
        events.write("choice", name="checkpoints", value=choice.value, reason=choice.reason)
    order = _start_order(store, world, places)
    asked = None if order is None else order[0]
    found = survey_together(folder, world, places)
    bad: dict[str, PassedOver] = {}

    def pass_over(passed: PassedOver) -> None:
        bad[passed.name] = passed
        events.write("passed_over", checkpoint=passed.name, reason=passed.reason, text=str(passed))

    for passed in found.passed_over:
        if asked is None or step_of(passed.name) <= asked:  # later ones are set aside
            pass_over(passed)
    for whole in found.whole:
        if asked is not None and whole.name != step_folder_name(asked):
            continue
        try:
            checkpoint, fetched = verified(store, whole, needs, world, places)
        except Unusable as error:
            pass_over(PassedOver(whole.name, str(error)))
            continue
        if order is not None:
            _set_later_aside(store, *order, world, places)
        name, step = whole.name, checkpoint.step
        text = f"every file of checkpoint {name} is as it was written: the run goes on after step {step}"
        events.write("resume", step=step, checkpoint=name, world_size=world.size, text=text)
        if places.leads:
            (folder / GO_ON_FROM).unlink(missing_ok=True)  # followed: whoever starts again goes on from the newest
        return ResumePoint(store, checkpoint, frozenset(bad), None, places, fetched)
    if asked is not None:
        _refuse_start(asked, store, bad.values(), world)
    if bad and (found.is_spread or not places.is_one):
        _refuse_to_start_anew(store, list(bad.values()), world)
    return ResumePoint(store, None, frozenset(bad), None, places)


def _open_places(store: Store, world: World) -> Places:
    """Make and tidy every place; `--fresh` cleared one and left a mark there, the others are cleared now."""
    problem = None
    if world.rank == 0:
        try:
            store.make()
            store.sweep()
        except OSError as error:
            problem = f"{store.folder} cannot be written: {error.strerror or error}"
    problem = world.broadcast(problem)
    if problem:
        raise NoPlace(problem)
    places = find_places(store, world)
    mark = store.folder / START_ANEW
    if not places.is_one:
        anew = any(world.gather(places.leads and mark.exists()))
        if places.leads:
            try:
                store.sweep()
                if anew:
                    store.empty()
            except OSError as error:
                host = world.hostnames[world.rank]
                problem = f"on {host} {store.folder} cannot be cleared: {error.strerror or error}"
        for each in world.gather(problem):
            if each:
                raise NoPlace(each)
    if places.leads and mark.exists():  # only now: whoever is killed before that finds it again
        mark.unlink()
    return places


def _start_order(store: Store, world: World, places: Places) -> tuple[int, str] | None:
    """The step that `train --from` named, and the folder for later ones; it is said where rank 0 is, and nowhere else:
    a mark on another host is one that an earlier start left."""
    mark, order = store.folder / GO_ON_FROM, None
    try:
        if world.rank == 0:
            order = json.loads(mark.read_text()) if mark.exists() else None
        elif places.leads:
            mark.unlink(missing_ok=True)
    except (OSError, ValueError):  # half-written, by one that is gone: nothing was moved yet
        order = None
    order = world.broadcast(order)
    return None if order is None else (int(order["step"]), str(order["aside"]))


def _set_later_aside(store: Store, step: int, aside: str, world: World, places: Places) -> None:
    """In every place, once this step is known to be good."""
    problem = None
    if places.leads:
        try:
            store.set_aside(step, aside)
        except OSError as error:
            problem = f"on {world.hostnames[world.rank]}: {error.strerror or error}"
    problems = [each for each in world.gather(problem) if each]
    if problems:
        failure = StorageError("later checkpoints cannot be set aside", where=str(store.folder), why=problems[0])
        failure.silent = world.rank != 0
        raise failure


def _refuse_start(step: int, store: Store, passed_over: Iterable[PassedOver], world: World) -> None:
    error = InputError(
        f"step {step}, which --from named, cannot be used",
        where=str(store.folder),
        why="; ".join(str(each) for each in passed_over if each.name == step_folder_name(step)) or "it is gone",
        do="name another step; what was set aside already lies in set-aside-... there, and can be moved back",
    )
    error.silent = world.rank != 0
    raise error


def survey_together(folder: Path, world: World, places: Places) -> JointSurvey:
    """What all places hold, the same on every rank."""
    view = view_of(survey(folder)) if places.leads else None
    if places.is_one:
        views = {0: world.broadcast(view)}
    else:
        views = {rank: each for rank, each in enumerate(world.gather(view)) if each is not None}
    return join_views(views, world.hostnames)


def verified(store: Store, whole: Whole, needs: Needs, world: World, places: Places) -> tuple[Checkpoint, Path | None]:
    """Hash every file where it lies, each once a place; raises Unusable on all ranks where one has no good copy."""
    mine, failures = _verified_share(store.folder / whole.name, whole, places)
    told = world.gather(failures)
    bad: dict[int, set[str] | None] = {}
    for rank, each in enumerate(told):
        place = places.of_rank[rank]
        files = bad.setdefault(place, set())
        bad[place] = None if files is None or "" in each else files | set(each)
    left = whole.without(bad)
    if left.lost:
        raise Unusable(next(reason for each in told for reason in each.values()))
    if places.is_one:
        assert mine is not None
        return mine, None
    if bad[places.mine] is None:
        mine = None
    return assemble(store, left, mine, needs, world, places)


def _verified_share(folder: Path, whole: Whole, places: Places) -> tuple[Checkpoint | None, dict[str, str]]:
    """Hash this rank's turn of the files that lie here, and the small state file everywhere; by file what is wrong.

    An empty name stands for the folder.
    """
    names = [file for file, holders in whole.holders.items() if places.mine in holders]
    if not names:
        return None, {}
    failures: dict[str, str] = {}
    try:
        checkpoint = open_checkpoint(folder)
        if checkpoint.digest != whole.digest:
            raise Unusable("its manifest has changed")
    except Unusable as error:
        return None, {"": str(error)}
    ranks = places.ranks_of(places.mine)
    mine = {*names[ranks.index(places.rank) :: len(ranks)], *({STATE_FILE} & set(names))}
    total_bytes = sum(file.bytes for file in checkpoint.manifest.files if file.name in mine)
    with HEARTBEAT.work("checking the checkpoint", total_bytes):
        for name in sorted(mine):
            try:
                checkpoint.verify([name])
            except Unusable as error:
                failures[name] = str(error)
    return checkpoint, failures


def _refuse_to_start_anew(store: Store, passed_over: Sequence[PassedOver], world: World) -> None:
    """Checkpoints are there, but a host that holds a part of each is not, or not its disk: that is no fresh start."""
    error = StorageError(
        "this run has saved before, but none of its checkpoints is whole on the hosts that are here",
        where=str(store.folder),
        why="; ".join(str(each) for each in passed_over[:3]),
        do="bring back the folder of the host that is missing, and run the same command; or start anew with --fresh",
    )
    error.silent = world.rank != 0
    raise error
