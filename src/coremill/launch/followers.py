"""The line a rank leaves in its log when it ends only because another one failed.

The launcher reads it so as not to blame that rank: both end with the same exit code, often within milliseconds.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"^coremill: rank \d+ ends because rank \d+ failed$", re.MULTILINE)


def follower_line(rank: int, failed_rank: int) -> str:
    """What a rank writes as it follows another one."""
    return f"coremill: rank {rank} ends because rank {failed_rank} failed"


def is_follower(log_tail: str) -> bool:
    """Whether the end of a rank's log says that it only followed."""
    return _LINE.search(log_tail) is not None
