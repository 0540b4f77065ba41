"""Times and intervals as people write them in a run file: 30s, 10m, 1.5h, 100steps."""

from __future__ import annotations

from dataclasses import dataclass

DURATION_PATTERN = r"^\d+(\.\d+)?(s|m|h)$"
INTERVAL_PATTERN = r"^(\d+(\.\d+)?(s|m|h)|[1-9]\d*steps?|never)$"
LIMIT_PATTERN = r"^(\d+(\.\d+)?(s|m|h)|auto)$"
WAIT_PATTERN = r"^(\d+(\.\d+)?(s|m|h)|auto|never)$"
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Interval:
    """How often something happens: by the clock, by steps, or not at all (both None)."""

    seconds: float | None = None
    steps: int | None = None


def seconds_of(text: str) -> float:
    """`10m` in seconds; the schema has checked the form."""
    return float(text[:-1]) * _SECONDS[text[-1]]


def interval_of(text: str) -> Interval:
    """`10m`, `100steps` or `never`; the schema has checked the form."""
    if text == "never":
        return Interval()
    if "step" in text:
        return Interval(steps=int(text.partition("step")[0]))
    return Interval(seconds=seconds_of(text))
