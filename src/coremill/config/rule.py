"""A rule between keys: what it is, and what is said where it is broken. The rules: rules.py and those it collects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coremill.config.schema import RunConfig


@dataclass(frozen=True)
class Breach:
    """A broken rule; `key` is the one to point at first, `others` stand beside it."""

    key: str
    what: str
    why: str
    do: str
    others: tuple[str, ...] = ()


Check = Callable[[RunConfig], Breach | None]


@dataclass(frozen=True)
class Rule:
    """A check between keys, and the keys it reads."""

    reads: tuple[str, ...]
    check: Check

    @property
    def summary(self) -> str:
        return (self.check.__doc__ or "").strip().splitlines()[0]
