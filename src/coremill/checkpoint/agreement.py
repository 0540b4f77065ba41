"""Which checkpoints are whole over all places. Pure: what each place holds goes in, no torch and no disk here.

A place is a folder of checkpoints with the hosts that see it. A save is spread over places: each has the same manifest
and the files of its own ranks. It is whole where one manifest is found whose every file lies in some place; a run that
died between the renames of two places leaves a step that is not, and the step before it is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremill.checkpoint.manifest import PassedOver, Survey, step_of

View = Mapping[str, Any]  # what one place holds, as it travels: {"held": [...], "passed_over": [[name, reason]]}


@dataclass(frozen=True)
class Whole:
    """A checkpoint whose every file lies somewhere."""

    name: str
    digest: str  # of its manifest's text
    holders: Mapping[str, tuple[int, ...]]  # by file: the places that have it

    def without(self, bad: Mapping[int, Iterable[str] | None]) -> Whole:
        """After files turned out to be altered; None for a place stands for all of its files."""
        gone = {(place, file) for place, files in bad.items() for file in (self.holders if files is None else files)}
        left = {
            file: tuple(place for place in places if (place, file) not in gone) for file, places in self.holders.items()
        }
        return Whole(self.name, self.digest, left)

    @property
    def lost(self) -> list[str]:
        """Files that no place has."""
        return sorted(file for file, places in self.holders.items() if not places)


@dataclass(frozen=True)
class JointSurvey:
    """What all places together hold, newest first."""

    whole: tuple[Whole, ...]
    passed_over: tuple[PassedOver, ...]
    is_spread: bool  # whether any was saved by hosts that share no folder

    def steps(self, bad: frozenset[str] = frozenset()) -> list[int]:
        """Of those that are whole, less those in `bad`."""
        return [step_of(each.name) for each in self.whole if each.name not in bad]

    def kept(self, keep: int, bad: frozenset[str], beside: int | None = None) -> list[str] | None:
        """The newest so many, those in `bad` not counted, and the step `beside` them; None: there are not enough to let
        any other go."""
        names = [each.name for each in self.whole if each.name not in bad]
        newest = names[:keep]
        return [*newest, *(name for name in names[keep:] if step_of(name) == beside)] if len(newest) == keep else None


def view_of(found: Survey) -> dict[str, Any]:
    """What lies in one place, ready to travel."""
    return {
        "held": [
            {
                "name": each.folder.name,
                "digest": each.digest,
                "here": sorted({file.name for file in each.manifest.files} - set(each.away)),
                "away": dict(each.away),
                "spread": bool(each.manifest.hosts),
            }
            for each in found.sound
        ],
        "passed_over": [[each.name, each.reason] for each in found.passed_over],
    }


def join_views(views: Mapping[int, View], hosts: Sequence[str]) -> JointSurvey:
    """Join the views, by place; `hosts` by place give reasons a name."""
    names = {held["name"] for view in views.values() for held in view["held"]}
    names |= {name for view in views.values() for name, _ in view["passed_over"]}
    whole: list[Whole] = []
    passed_over: list[PassedOver] = []
    for name in sorted(names, key=step_of, reverse=True):
        held = {place: each for place, view in views.items() for each in view["held"] if each["name"] == name}
        saves = [_joined(name, digest, held) for digest in sorted({each["digest"] for each in held.values()})]
        usable = [save for save in saves if not save.lost]
        if usable:
            whole.append(usable[0])
        else:
            passed_over.append(PassedOver(name, _reason(name, views, held, saves, hosts)))
    spread = any(held["spread"] for view in views.values() for held in view["held"])
    return JointSurvey(tuple(whole), tuple(passed_over), spread)


def _joined(name: str, digest: str, held: Mapping[int, Mapping[str, Any]]) -> Whole:
    parts = {place: each for place, each in held.items() if each["digest"] == digest}
    files = {file for each in parts.values() for file in (*each["here"], *each["away"])}
    return Whole(
        name,
        digest,
        {file: tuple(sorted(place for place in parts if file in parts[place]["here"])) for file in sorted(files)},
    )


def _reason(
    name: str,
    views: Mapping[int, View],
    held: Mapping[int, Mapping[str, Any]],
    saves: Sequence[Whole],
    hosts: Sequence[str],
) -> str:
    """In words: what a place says of its own folder, else what is missing."""
    own = [(place, why) for place, view in views.items() for other, why in view["passed_over"] if other == name]
    if own:
        place, why = own[0]
        return why if len(views) == 1 else f"on {hosts[place]}: {why}"
    if len(saves) > 1:
        return "its parts on different hosts are of different saves, and none of these is whole"
    lost = saves[0].lost
    why = str(next(each["away"][lost[0]] for each in held.values() if lost[0] in each["away"]))
    return why if len(lost) == 1 else f"{why}, and {len(lost) - 1} more with it"
