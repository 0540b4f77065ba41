"""When a run whose ranks ended goes on by itself, and when it does not. Torch-free, and knows of no file.

    exit code                                       what follows
    0, 75 (stopped), 70 (not finite), 78 (input)    the end: the same command would give the same
    127 (no such command), 130 (Ctrl-C twice)       the end
    1 before the first step                         the end: the same command would give the same
    1, 69, 74, 128 + signal, stuck                  all ranks start again from the newest whole checkpoint

Restarts are spent on lack of progress, not counted blindly: each newly committed step gives all of them back. Three in
a row without one are a crash loop, which ends with the last cause. An attempt in which the ranks never found each other
(a host is away) costs none: it has a time of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from coremill.errors import CoremillError, InputError, Interrupted, NonFinite, PeerLost, Stopped, StorageError
from coremill.supervise.ranks import Outcome

NEVER_AGAIN = frozenset({0, InputError.exit_code, NonFinite.exit_code, Stopped.exit_code, Interrupted.exit_code, 127})
RESTARTS_WITHOUT_PROGRESS = 3

Cause = Literal["killed", "out of memory", "stuck", "failed", "peer lost", "storage"]


def is_worth_a_restart(exit_code: int) -> bool:
    """Whether the same command may fare better the next time."""
    return exit_code not in NEVER_AGAIN


def cause_of(outcome: Outcome) -> Cause:
    if outcome.is_out_of_memory:
        return "out of memory"
    if outcome.exit_code == StorageError.exit_code:
        return "storage"
    if outcome.stuck is not None:
        return "stuck"
    if outcome.signal is not None:
        return "killed"
    return "peer lost" if outcome.exit_code == PeerLost.exit_code else "failed"


@dataclass(frozen=True)
class Decision:
    """What follows a failure."""

    restart: bool
    number: int  # of restarts without a new committed step, this one counted
    why_not: str = ""  # in words, where there is no restart although the exit code was worth one


class RestartBudget:
    """Counts restarts against committed steps."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        without_progress: int = RESTARTS_WITHOUT_PROGRESS,
        wait_for_hosts_seconds: float = 0.0,
        committed_step: int = 0,
    ) -> None:
        self._enabled = enabled
        self._without_progress = without_progress
        self._wait_for_hosts_seconds = wait_for_hosts_seconds
        self._best = committed_step
        self._spent = 0
        self._alone_since: float | None = None

    def decide(
        self, outcome: Outcome, committed_step: int, *, has_met: bool, now: float, has_trained: bool = True
    ) -> Decision:
        """After an attempt that ended with `outcome`; `committed_step` is the newest whole checkpoint's."""
        if committed_step > self._best:
            self._best, self._spent = committed_step, 0
        if has_met:
            self._alone_since = None
        if not is_worth_a_restart(outcome.exit_code) or outcome.on_request:
            return Decision(False, self._spent)
        if not self._enabled:
            return Decision(False, self._spent, "supervise.restart is false")
        if outcome.exit_code == CoremillError.exit_code and not has_trained:
            return Decision(False, self._spent, "it failed before its first step, and would again")
        if outcome.unkillable:
            ranks = ", ".join(str(rank) for rank in outcome.unkillable)
            return Decision(False, self._spent, f"rank {ranks} hangs in the kernel and cannot be ended")
        if not has_met and outcome.exit_code == PeerLost.exit_code and self._wait_for_hosts_seconds:
            if self._alone_since is None:
                self._alone_since = now
            if now - self._alone_since < self._wait_for_hosts_seconds:
                return Decision(True, self._spent)
            return Decision(False, self._spent, f"the others did not come back within {now - self._alone_since:.0f} s")
        if self._spent >= self._without_progress:
            times = "once" if self._spent == 1 else f"{self._spent} times"
            return Decision(False, self._spent, f"restarted {times} without a new committed step")
        self._spent += 1
        return Decision(True, self._spent)


class Attempt(Protocol):
    """One life of the ranks."""

    def run(self, number: int) -> Outcome:
        """Start them and watch them until all have ended; `number` counts from 0."""

    @property
    def has_met(self) -> bool:
        """Whether the ranks of the last run found each other."""

    @property
    def has_trained(self) -> bool:
        """Whether a step was done in any run."""


def supervise(
    attempt: Attempt,
    budget: RestartBudget,
    committed_step: Callable[[], int],
    on_fault: Callable[[Outcome, Decision, int], None],
) -> Outcome:
    """Run attempts until one ends for good; returns how. `on_fault` hears of every failure with what follows it."""
    number = 0
    while True:
        outcome = attempt.run(number)
        if outcome.exit_code == 0:
            return outcome
        committed = committed_step()
        decision = budget.decide(
            outcome, committed, has_met=attempt.has_met, has_trained=attempt.has_trained, now=time.monotonic()
        )
        on_fault(outcome, decision, committed)
        if not decision.restart:
            return outcome
        number += 1
