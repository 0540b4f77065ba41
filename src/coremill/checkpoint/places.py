"""Which hosts see the same checkpoint folder: found out by a file that one writes and others look for. No torch here.

A place is a folder with the ranks that see it; the lowest of them leads it: that rank's number stands for the place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coremill.checkpoint.store import SEEN_PREFIX, Store
from coremill.plan.types import Choice
from coremill.world.group import World


class NoPlace(Exception):
    """A folder cannot be written; the text says on which host and why. Raised on all ranks alike."""


@dataclass(frozen=True)
class Places:
    """Who sees which folder."""

    of_rank: tuple[int, ...]  # the place of every rank
    hostnames: tuple[str, ...]  # by rank
    rank: int

    @property
    def mine(self) -> int:
        return self.of_rank[self.rank]

    @property
    def leads(self) -> bool:
        """Whether this rank commits and prunes in its place."""
        return self.mine == self.rank

    @property
    def is_one(self) -> bool:
        """Whether all see one folder."""
        return len(set(self.of_rank)) == 1

    @property
    def leaders(self) -> list[int]:
        """One rank of each place, in order."""
        return sorted(set(self.of_rank))

    def ranks_of(self, place: int) -> list[int]:
        return [rank for rank, other in enumerate(self.of_rank) if other == place]

    @property
    def share(self) -> float:
        """Of the ranks: how large a part of a checkpoint lies here."""
        return len(self.ranks_of(self.mine)) / len(self.of_rank)

    def choice(self) -> Choice[str]:
        """For the screen and the events."""
        if self.is_one:
            return Choice("shared", "all hosts see one folder")
        hosts = [dict.fromkeys(self.hostnames[rank] for rank in self.ranks_of(place)) for place in self.leaders]
        if all(len(names) == 1 for names in hosts):
            blind, first = self.hostnames[self.leaders[1]], self.hostnames[0]
            return Choice("per host", f"{blind} does not see {first}'s folder")
        seen = "; ".join(f"{', '.join(names)} {'see' if len(names) > 1 else 'sees'} one" for names in hosts)
        return Choice(f"in {len(hosts)} places", f"not all hosts see the same folder: {seen}")


def find_places(store: Store, world: World) -> Places:
    """Every rank calls it, once rank 0 has made its folder; raises NoPlace.

    Where all see what rank 0 wrote, that is all. Else those who do not write such a file themselves, and each rank
    looks for the lowest one it sees: rank 0's once more, for a network file system may have remembered that it was not
    there before.
    """
    if world.nodes == 1:
        return Places((0,) * world.size, world.hostnames, world.rank)
    problem = _write_token(store, 0) if world.rank == 0 else None
    _refuse(world.gather(problem), world)
    try:
        seen = world.gather(_token(store, 0).exists())
        if all(seen):
            return Places((0,) * world.size, world.hostnames, world.rank)
        _refuse(world.gather(None if seen[world.rank] else _write_token(store, world.rank)), world)
        blind = [rank for rank in range(world.size) if not seen[rank]]
        first = next(rank for rank in (0, *blind) if _token(store, rank).exists())
        return Places(tuple(world.gather(first)), world.hostnames, world.rank)
    finally:
        with contextlib.suppress(OSError):  # a host may see a folder that it cannot write
            _token(store, world.rank).unlink(missing_ok=True)


def _token(store: Store, rank: int) -> Path:
    return store.folder / f"{SEEN_PREFIX}{store.attempt}-{rank}"


def _write_token(store: Store, rank: int) -> str | None:
    try:
        store.make()
        _token(store, rank).touch()
    except OSError as error:
        return f"{store.folder} cannot be written: {error.strerror or error}"
    return None


def _refuse(problems: Sequence[str | None], world: World) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise NoPlace(f"on {world.hostnames[rank]} {problem}")
