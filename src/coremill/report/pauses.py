"""When nobody ran: the time between a stop, or an end that nobody mended, and the command that went on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Span = tuple[float, float]  # from and until, unix seconds


def starts_again(attempts: Iterable[float]) -> int:
    """How many attempts there were after the first, by whomever: a launcher, a new pod, the same command given again.

    Each by when rank 0 came; 0: a rank that named none.
    """
    return max(0, sum(attempt > 0 for attempt in attempts) - 1)


def pauses_between(attempts: Iterable[Span], restarts_after: Sequence[float]) -> list[Span]:
    """The gaps between attempts, but for those in which ranks were started again: a restart is part of the run.

    `restarts_after`: the times of the faults after which a launcher started all ranks again.
    """
    spans = sorted(attempts)
    found, ended = [], spans[0][1] if spans else 0.0
    for (began_before, _), (began, last) in pairwise(spans):
        if began > ended and not any(began_before <= fault <= began for fault in restarts_after):
            found.append((ended, began))
        ended = max(ended, last)
    return found
