"""Times and intervals as people write them in a run file: 30s, 10m, 1.5h, 100steps."""

from __future__ import annotations

import re
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


_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("step", "steps", "it", "iters", "iterations"), "steps"),
}


def durations_meant(value: object) -> tuple[str, ...]:
    """What people write for a time in our form, the likelier first: 10 min, 1 hour, 2d, 1h30m, 00:10:00, 100."""
    text = str(value).strip().lower()
    if re.fullmatch(r"[1-9]\d*", text):
        return f"{text}steps", f"{text}s"
    if days := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:d|day|days)", text):
        return (f"{float(days[1]) * 24:g}h",)
    if clock := re.fullmatch(r"(\d+):(\d\d)(?::00)?", text):
        return (f"{int(clock[1]) * 60 + int(clock[2])}m",)
    if joined := re.fullmatch(r"(\d+) ?h(?:ours?)? ?(\d+) ?m(?:in(?:utes)?)?", text):
        return (f"{int(joined[1]) * 60 + int(joined[2])}m",)
    single = re.fullmatch(r"(?:every )?(\d+(?:\.\d+)?)[ _-]?([a-z]+)", text)
    return (f"{single[1]}{_UNITS[single[2]]}",) if single and single[2] in _UNITS else ()
