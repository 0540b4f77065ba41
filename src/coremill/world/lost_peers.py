"""Telling a lost peer from other errors, in a rank and in its log.

In a rank: gloo and the store raise plain RuntimeErrors for both. In the log of a rank that ended: the launcher must not
blame one that ended only because another did, with the same exit code and often within milliseconds.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from coremill.errors import PeerLost
from coremill.world.heartbeat import HEARTBEAT

# What gloo and the store say when the other side is gone or silent (torch 2.11 and 2.13).
_LOST_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "wait timeout after",
    "application timeout caused pair closure",
    "socket timeout",
    "no route to host",
    "network is unreachable",
    "failed to recv, got 0 bytes",
    "gloo connectfullmesh failed",
    "client socket has timed out",
    "the client socket has failed to connect",
)


# Set where this rank itself shut its connections, because nobody got on (world/peer_progress.py).
_GIVEN_UP_AFTER: list[float] = []


def give_peers_up(after_seconds: float) -> None:
    """What torch says from now on of closed connections is our own doing."""
    _GIVEN_UP_AFTER[:] = [after_seconds]


def as_peer_lost(exception: BaseException) -> PeerLost | None:
    """The PeerLost that a gloo or store error stands for, or None where it is something else."""
    if isinstance(exception, PeerLost):
        return exception
    if not isinstance(exception, RuntimeError):
        return None
    text = str(exception)
    lowered = text.lower()
    of_torch = "gloo" in lowered or any(parent.__name__ == "DistError" for parent in type(exception).__mro__)
    if not of_torch or not any(phrase in lowered for phrase in _LOST_PHRASES):
        return None
    silent = bool(_GIVEN_UP_AFTER) or "timed out" in lowered or "timeout" in lowered
    why = text.splitlines()[0]
    if _GIVEN_UP_AFTER:
        why = f"this rank waited, and no rank got on for {_GIVEN_UP_AFTER[0]:.0f} s"
    return PeerLost(
        "another rank stopped answering" if silent else "the connection to another rank was lost",
        why=why,
        do="look at the log of the rank that ended first; a lost host or a full memory are the usual causes",
    )


@contextlib.contextmanager
def peer_errors() -> Iterator[None]:
    """Raise what torch says of a lost peer as `PeerLost`; the launcher is told that this rank waits for others."""
    try:
        with HEARTBEAT.waiting():
            yield
    except RuntimeError as error:
        lost = as_peer_lost(error)
        if lost is None:
            raise
        raise lost from error


_FOLLOWER_LINE = re.compile(r"^coremill: rank \d+ ends because rank \d+ failed$", re.MULTILINE)
# The last line of a program that lets torch's exception through: gloo's or the store's word for a lost connection.
_LOST_LINE = re.compile(
    r"^(?:\[rank\d+\]: )?\S*(?:RuntimeError|DistBackendError|DistNetworkError|DistStoreError): "
    r".*(?:gloo|[Ss]tore|recvValue|socket).*"
    r"(?:onnection (?:closed|reset) by peer|[Bb]roken pipe|failed to recv, got 0 bytes)",
    re.MULTILINE,
)


def follower_line(rank: int, failed_rank: int) -> str:
    """What a rank writes as it follows another one."""
    return f"coremill: rank {rank} ends because rank {failed_rank} failed"


def is_follower(log_tail: str) -> bool:
    """Whether the end of a rank's log says that it only followed."""
    return _FOLLOWER_LINE.search(log_tail) is not None or _LOST_LINE.search(log_tail) is not None
