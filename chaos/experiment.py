"""What an experiment is: a fault, a promise, so many trials; and what is left of them, a row of the table.

Durations come from events and kernel facts (when a process was gone, when a step was done), never from a sleep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

COREMILL = "coremill"
SHORT_SEED = 20  # `make test` breaks the same things at the same places every time; the long form takes a new seed


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault and what came of it."""

    passed: bool
    fault: str  # in words: what was done to whom, and when
    outcome: str  # in words: what happened
    detected_seconds: float | None = None  # from the fault until somebody other than its victim said so
    resumed_seconds: float | None = (
        None  # from the fault until the next step was done, or, where it was to end, until it had
    )
    steps_lost: int | None = None  # done before the fault, and done again
    same_bits: bool | None = None  # every loss and the final weights, against a run left in peace
    exit_code: int | None = None
    is_compared: bool = True  # False: in a campaign, but on a run of its own that is not compared


@dataclass(frozen=True)
class Rig:
    """What every experiment is given."""

    folder: Path  # its own, empty; removed when all trials passed
    seed: int
    shared: Path  # for what several experiments make once: models, references, caches

    def random(self, purpose: str) -> Random:
        """Random numbers that depend on the seed and the purpose only."""
        return Random(f"{self.seed}/{purpose}")


# Given keys and numbers of trials, yields them in any order; returns what differs in the end from a run left in peace.
Campaign = Callable[[Rig, "dict[str, int]"], Generator["tuple[str, Trial]", None, "str | None"]]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A fault and a promise."""

    key: str  # X1, as in docs/chaos.md
    fault: str
    promise: str
    short_trials: int  # in `make test`; 0: left out there
    long_trials: int
    seconds_per_trial: float  # a guess for the progress bar, on two slow cores
    run: Callable[[Rig, int], Iterator[Trial]] | None = None
    campaign: Campaign | None = None  # instead of `run`: experiments that share one run and one undisturbed reference
    system: str = COREMILL
    start_seconds: float = 0.0  # once, beside the trials
    why_not: Callable[[], str | None] = lambda: None  # what this machine lacks for it

    @property
    def name(self) -> str:
        """Of coremill's experiments the key alone."""
        return self.key if self.system == COREMILL else f"{self.key}@{self.system}"

    def expected_seconds(self, trials: int) -> float:
        """For the progress bar."""
        return self.start_seconds + trials * self.seconds_per_trial


@dataclass(frozen=True, kw_only=True)
class Row:
    """An experiment after its trials."""

    key: str
    system: str
    fault: str
    promise: str
    trials: int
    passed: int
    detected_seconds: tuple[float, ...]
    resumed_seconds: tuple[float, ...]
    steps_lost: tuple[int, ...]
    same_bits: bool | None  # None: no trial compares
    exit_codes: tuple[int, ...]  # different ones
    outcomes: dict[str, int]  # how often each thing happened
    seconds: float
    machine: str
    not_run: str | None = None  # why
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Every trial kept the promise; a row that was not run is not bad."""
        return self.passed == self.trials

    @staticmethod
    def of(experiment: Experiment, trials: Sequence[Trial], *, seconds: float, machine: str) -> Row:
        """The trials of one experiment together."""
        compared = [trial.same_bits for trial in trials if trial.same_bits is not None]
        outcomes: dict[str, int] = {}
        for trial in trials:
            outcomes[trial.outcome] = outcomes.get(trial.outcome, 0) + 1
        return Row(
            key=experiment.key,
            system=experiment.system,
            fault=experiment.fault,
            promise=experiment.promise,
            trials=len(trials),
            passed=sum(trial.passed for trial in trials),
            detected_seconds=tuple(t.detected_seconds for t in trials if t.detected_seconds is not None),
            resumed_seconds=tuple(t.resumed_seconds for t in trials if t.resumed_seconds is not None),
            steps_lost=tuple(trial.steps_lost for trial in trials if trial.steps_lost is not None),
            same_bits=all(compared) if compared else None,
            exit_codes=tuple(sorted({trial.exit_code for trial in trials if trial.exit_code is not None})),
            outcomes=outcomes,
            seconds=seconds,
            machine=machine,
            failures=[vars(trial) for trial in trials if not trial.passed],
        )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed; no interpolation, it is a value that occurred."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
