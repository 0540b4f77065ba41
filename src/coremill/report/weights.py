"""What became of a model's files, in words: parameters they lack, and tensors in them that nothing takes.

Of a model that was made from scratch on request there is nothing to tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN_NAMES = 3


def weight_findings(load: Mapping[str, Any] | None) -> list[str]:
    """Lines for the screen and the report, from the fields of a `load` event."""
    drawn, unused = (list((load or {}).get(key) or ()) for key in ("initialised", "unexpected"))
    lines = []
    if (load or {}).get("new_head"):
        other = f"; {_some(unused)} of the files {'is' if len(unused) == 1 else 'are'} not used" if unused else ""
        return [f"a new head is learned, drawn by train.seed: {_some(drawn)}{other}, as is usual for this task"]
    if drawn:
        subject = "1 parameter is" if len(drawn) == 1 else f"{len(drawn)} parameters are"
        lines.append(f"{subject} in none of the weight files, so drawn at random: {_some(drawn)}")
    if unused:
        subject = "1 tensor" if len(unused) == 1 else f"{len(unused)} tensors"
        lines.append(f"{subject} of the weight files left unused, the model has no place for them: {_some(unused)}")
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
