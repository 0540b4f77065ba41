"""What a tracker is: a class around one library, and the values it is given. No library is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class About:
    """What goes along with the numbers; secrets are blotted out already."""

    name: str  # of the run: its folder's, with the step where it has gone back to one
    config: Mapping[str, Any]  # the run file, every key written out
    config_text: str
    plan: Mapping[str, Any]  # as in plan.json
    hardware: Mapping[str, Any]
    group: str = ""  # the name of its folder, which all runs of the tracker for it have in common
    from_step: int | None = None  # the step it has gone back to

    def going_back_to(self, step: int) -> About:
        """The same of a run that goes on from one of its steps, another way than before."""
        return replace(self, name=f"{self.group}-from-step-{step}", from_step=step)


@dataclass(frozen=True)
class Point:
    """Numbers of one step, by name."""

    step: int
    time: float  # unix seconds
    numbers: Mapping[str, float]
    goes_back_to: int | None = None  # what was told of steps after this one is of a way that the run has left

    @property
    def kind(self) -> str:
        """train or eval, as the names of the numbers begin."""
        return next(iter(self.numbers), "train/").partition("/")[0]


@dataclass(frozen=True)
class Opened:
    """A tracker that is ready."""

    run_id: str  # by which the tracker knows the run: kept in the run folder, and handed over at a continuation
    words: str  # where it writes, and the command or address to look at it
    has: Mapping[str, int] = field(default_factory=dict)  # the newest step of train and eval, where it can tell


class Tracker:
    """One tracker, in a process of its own: it may wait as long as it likes. Calls come in this order.

    Whatever raises is tried again later with the same arguments.
    """

    can_rewind = False  # True: `forget_after` works
    can_branch = False  # True: `branch` works

    def open(self, about: About, folder: Path, run_id: str | None) -> Opened:
        """Begin, or go on with the run of that id; `folder` is its own in the run folder."""
        raise NotImplementedError

    def forget_after(self, step: int) -> None:
        """Steps after this one are done again: what was said of them no longer holds."""

    def branch(self, about: About, folder: Path) -> Opened:
        """The run has gone back to `about.from_step`: end what is open, and begin a run beside it for what comes."""
        raise NotImplementedError

    def log(self, points: Sequence[Point]) -> None:
        """Take numbers in; steps never fall, and one step may come twice with other names."""
        raise NotImplementedError

    def note(self, lines: Sequence[str], step: int) -> None:
        """What happened so far (saves, faults, restarts), in words, oldest first; replaces what was noted before."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The end: `state` and `exit_code`, and the rest of report.json where there is one."""


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as one level: train.learning_rate."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return leaves


def plan_in_short(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen, one value each, and what it was expected to come to."""
    chosen = {key: value["value"] for key, value in plan.items() if isinstance(value, Mapping) and "value" in value}
    plain = {key: value for key, value in plan.items() if isinstance(value, str | int | float)}
    return chosen | plain
