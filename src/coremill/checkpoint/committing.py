"""How the parts that ranks wrote become a checkpoint in every place, or in none.

    every rank         its file, written and synced -> a report in the store
    rank 0             all reports heard: the whole manifest, for the leaders of other places through the store
    each place's lead  state, manifest, rename -> a report with what lies there now
    rank 0             all places have it, or one failed: the outcome, for all ranks
    each place's lead  removes what is older than the `keep` that are whole over all places, but for the best of all
                       that are whole (`evaluation.keep_best`); or takes it back

Killed in between, a step lies in some places only; the next start sees that it is not whole (agreement.py). A leader
whose disk hangs is waited for until the save is given up. Whether it was is decided once (in_flight.py): with one place
right before the rename, which nobody takes back; with several before the outcome is told, and the leaders ask once more
before they rename.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from coremill import __version__
from coremill.checkpoint.agreement import join_views, view_of
from coremill.checkpoint.in_flight import GivenUp, Save, error_text, wait_for
from coremill.checkpoint.manifest import Manifest, StoredFile, Survey, step_folder_name, survey
from coremill.checkpoint.places import Places
from coremill.checkpoint.snapshot import file_name
from coremill.checkpoint.store import Store, sealed
from coremill.world.group import World
from coremill.world.heartbeat import HEARTBEAT

# The store takes 8 MiB at a time; a manifest of 400 ranks has 30 MB, far less when compressed.
PIECE_BYTES = 2**20


class Committer:
    """One rank's part in all commits of an attempt."""

    def __init__(
        self,
        store: Store,
        world: World,
        places: Places,
        *,
        keep: int,
        bad: frozenset[str],
        engine: str,
        shapes: dict[str, tuple[int, ...]],
        best_of: Callable[[Sequence[int]], int | None],
    ) -> None:
        self._store, self._world, self._places, self._keep, self._bad = store, world, places, keep, bad
        self._engine, self._shapes, self._best_of = engine, shapes, best_of
        self._committed = 0  # the last save that was put into this place

    def settle(self, save: Save, partial: Path, report: dict[str, Any]) -> dict[str, Any]:
        """Hand in this rank's report and see the save through: why it failed (None: it is whole), and what is kept.

        Raises GivenUp where the save was given up meanwhile.
        """
        try:
            act = self._decide if self._world.rank == 0 else self._follow
            return act(save, partial, report)
        except GivenUp:
            self._take_back(save, partial)
            raise

    # --- rank 0 ---

    def _decide(self, save: Save, partial: Path, report: dict[str, Any]) -> dict[str, Any]:
        channel, prefix = self._world.store, f"save/{save.number}"
        others = [place for place in self._places.leaders if place != 0]
        keys = [f"{prefix}/{rank}" for rank in range(1, self._world.size)]
        wait_for(channel, keys, save)
        reports = [report, *(json.loads(channel.get(key)) for key in keys)]
        failure = next((each["error"] for each in reports if "error" in each), None)
        kept = None
        if failure is None:
            texts = self._texts(save, reports)
            if others:
                keys += self._publish(prefix, texts)
            views = {0: self._commit(save, partial, *texts)}
            views |= self._heard(f"{prefix}/place", others, save)
            failure = next((view["error"] for view in views.values() if "error" in view), None)
        if failure is None:
            found, bad = join_views(views, self._world.hostnames), self._bad - {step_folder_name(save.step)}
            kept = found.kept(self._keep, bad, self._best_of(found.steps(bad)))
        if not save.decide("written"):
            raise GivenUp
        outcome = {"failure": failure, "given_up": False, "kept": kept}
        channel.set(save.outcome_key, json.dumps(outcome))
        for key in keys:
            channel.delete_key(key)
        return outcome

    def _heard(self, prefix: str, places: Sequence[int], save: Save) -> dict[int, dict[str, Any]]:
        """What the leaders of other places say, by place."""
        channel = self._world.store
        wait_for(channel, [f"{prefix}/{place}" for place in places], save)
        heard = {place: json.loads(channel.get(f"{prefix}/{place}")) for place in places}
        for place in places:
            channel.delete_key(f"{prefix}/{place}")
        return heard

    def _texts(self, save: Save, reports: Sequence[dict[str, Any]]) -> tuple[bytes, bytes]:
        hosts = {}
        if not self._places.is_one:
            names = self._world.hostnames
            hosts = {file_name(rank, self._world.size): names[rank] for rank in range(self._world.size)}
        manifest = Manifest(
            step=save.step,
            attempt=self._store.attempt,
            world_size=self._world.size,
            engine=self._engine,
            parameters=self._shapes,
            files=tuple(StoredFile(**report) for report in reports),
            versions={"coremill": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
            hosts=hosts,
        )
        _, manifest_text, state_text = sealed(manifest, save.state)
        return manifest_text, state_text

    def _publish(self, prefix: str, texts: Sequence[bytes]) -> list[str]:
        """For the leaders of other places; returns the keys that were used."""
        channel = self._world.store
        data = _packed([text.decode() for text in texts])
        keys = [f"{prefix}/piece/{index}" for index in range(-(-len(data) // PIECE_BYTES))]
        for index, key in enumerate(keys):
            channel.set(key, data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
        channel.set(f"{prefix}/commit", str(len(keys)))
        return [*keys, f"{prefix}/commit"]

    # --- the others ---

    def _follow(self, save: Save, partial: Path, report: dict[str, Any]) -> dict[str, Any]:
        channel, prefix = self._world.store, f"save/{save.number}"
        channel.set(f"{prefix}/{self._world.rank}", json.dumps(report))
        if self._places.leads:
            wait_for(channel, [f"{prefix}/commit"], save, or_else=save.outcome_key)
            if not channel.check([save.outcome_key]):  # it would say that a rank failed: there is nothing to commit
                count = int(channel.get(f"{prefix}/commit"))
                data = b"".join(channel.get(f"{prefix}/piece/{index}") for index in range(count))
                view = self._commit(save, partial, *(text.encode() for text in _unpacked(data)))
                channel.set(f"{prefix}/place/{self._places.mine}", json.dumps(view))
        wait_for(channel, [save.outcome_key], save)
        outcome: dict[str, Any] = json.loads(channel.get(save.outcome_key))
        if outcome["given_up"] or not save.decide("written"):
            raise GivenUp
        return outcome

    # --- in each place ---

    def _commit(self, save: Save, partial: Path, manifest_text: bytes, state_text: bytes) -> dict[str, Any]:
        """What lies in this place now, or why the save could not be put there."""
        try:
            with HEARTBEAT.saving():
                self._store.put(partial, save.step, manifest_text, state_text, lambda: self._may_rename(save))
        except OSError as error:
            host = "" if self._places.is_one else f"{self._world.hostnames[self._world.rank]}: "
            return {"error": f"{host}{error_text(error)}"}
        self._committed = save.number
        try:
            return view_of(survey(self._store.folder))
        except OSError:  # the new one is whole; nothing can be said of older ones, so they stay
            return view_of(Survey((), ()))

    def _may_rename(self, save: Save) -> None:
        """The last moment at which giving up counts."""
        if self._places.is_one:
            given_up = not save.decide("written")
        else:
            given_up = save.given_up or self._world.store.check([save.outcome_key])
        if given_up:
            raise GivenUp

    def tidy(self, save: Save, partial: Path, outcome: dict[str, Any]) -> None:
        """All places have it, so older ones may go; or it failed, and nothing of it stays."""
        if outcome["failure"] is not None:
            self._take_back(save, partial)
            return
        if not self._places.leads:
            return
        self._bad -= {step_folder_name(save.step)}
        try:
            if outcome["kept"] is not None:
                self._store.prune_to(outcome["kept"])
        except OSError as error:  # the new checkpoint is whole; older ones simply stay
            print(f"coremill: old checkpoints stay: {error_text(error)}", file=sys.stderr, flush=True)

    def _take_back(self, save: Save, partial: Path) -> None:
        """In one place there is only what was not renamed: the rename was the last that could fail."""
        if self._places.leads:
            self._store.abandon(partial)
            if self._committed == save.number and not self._places.is_one:
                self._store.withdraw(save.step)


def _packed(texts: Sequence[str]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(texts).encode(), 1)).decode()


def _unpacked(data: bytes) -> list[str]:
    texts: list[str] = json.loads(zlib.decompress(base64.b64decode(data)))
    return texts
