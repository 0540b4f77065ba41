"""Telling a rank that failed from one that ended only because another did, by what it leaves in its log.

The launcher reads it so as not to blame the wrong one: both end with the same exit code, often within milliseconds.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"^coremill: rank \d+ ends because rank \d+ failed$", re.MULTILINE)
# The last line of a program that lets torch's exception through: gloo's or the store's word for a lost connection.
_LOST = re.compile(
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
    return _LINE.search(log_tail) is not None or _LOST.search(log_tail) is not None
