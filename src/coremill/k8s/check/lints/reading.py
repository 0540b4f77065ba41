"""Values of manifests that nobody has checked yet: what has the wrong form counts as not there."""

from __future__ import annotations

import re
from typing import Any

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?\d+)?\Z")
_POWERS = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_POWERS |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def at(value: Any, *path: str | int) -> Any:
    """What stands at a path, or None."""
    for key in path:
        if isinstance(value, dict) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def objects(value: Any) -> list[dict[str, Any]]:
    """A list of objects with whatever else stands in it emptied, so that places stay the same."""
    return [mapping(one) for one in listed(value)]


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def texts(value: Any) -> list[str]:
    return [one for one in listed(value) if isinstance(one, str)]


def quantity(value: Any) -> float | None:
    """30, "30", 500m, 54Gi as a number; None: it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    found = _QUANTITY.match(text(value))
    if found is None:
        return None
    unit = found[2] or ""
    return float(found[1]) * (_POWERS[unit] if unit in _POWERS else float(f"1{unit}"))


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def duration_seconds(value: Any) -> float | None:
    """2m, 1h30m as seconds; None: Never, or no duration."""
    parts = _DURATION.findall(text(value))
    if not parts or "".join(number + unit for number, unit in parts) != value:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
