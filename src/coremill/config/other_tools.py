"""The table of other tools' settings (other_tools.toml): words of launchers, variables, and scripts; names of settings
are made into rows by foreign.py, which knows our keys.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@functools.cache
def table() -> Mapping[str, Any]:
    """As it is written; the head of the file tells what its columns mean."""
    file = importlib.resources.files("coremill.config").joinpath("other_tools.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


@functools.cache
def flags() -> frozenset[str]:
    """Arguments after which a value may be missing, of launchers too."""
    alone = " ".join(row["names"] for row in table()["launchers"] if row.get("flag"))
    return frozenset(f"{table()['flags']} {alone}".split())


@functools.cache
def lists() -> frozenset[str]:
    """Arguments after which several values may follow."""
    return frozenset(table()["lists"].split())


@dataclass(frozen=True)
class Word:
    """An option of a launcher, or a variable of the environment."""

    names: tuple[str, ...]
    tools: tuple[str, ...]
    why: str
    says: str = ""  # which fact of a start it is
    becomes: str = ""  # what `coremill launch` takes instead; {} is the value
    is_flag: bool = False
    retired: bool = False
    in_launch: str | None = None
    only_if_on: bool = False  # said in launch where the variable is switched on
    with_openmp: str | None = None  # said in launch with this OpenMP runtime alone


@dataclass(frozen=True)
class Script:
    """An example script whose work `coremill train` does."""

    names: tuple[str, ...]
    task: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def launchers() -> tuple[Word, ...]:
    return tuple(_word(row) for row in table()["launchers"])


@functools.cache
def launcher_words() -> Mapping[str, Word]:
    """By name, in lower case with underscores but for single letters; the first of several tools' that share one."""
    return {name: word for word in reversed(launchers()) for name in word.names}


def launcher_word(tool: str, name: str) -> Word | None:
    """An option of one launcher; by another's row where its own have none, since they borrow from each other."""
    rows = [word for word in launchers() if name in word.names]
    return next((word for word in rows if tool in word.tools), rows[0] if rows and len(name) > 1 else None)


@functools.cache
def variables() -> tuple[Word, ...]:
    return tuple(_word(row) for row in table()["variables"])


def variable(name: str) -> Word | None:
    """The row for a variable of the environment."""
    exact = (word for word in variables() if name in word.names)
    like = (word for word in variables() for pattern in word.names if fnmatch.fnmatchcase(name, pattern))
    return next(exact, None) or next(like, None)


@functools.cache
def scripts() -> Mapping[str, Script]:
    rows = [Script(tuple(row["names"].split()), row["task"], row["defaults"]) for row in table()["scripts"]]
    return {name: row for row in rows for name in row.names}


def _word(row: Mapping[str, Any]) -> Word:
    return Word(
        names=tuple(row["names"].split()),
        tools=tuple(row["of"].split()),
        why=row.get("why", "the same option has another name here"),
        says=row.get("says", ""),
        becomes=row.get("becomes", ""),
        is_flag=row.get("flag", False),
        retired=row.get("retired", False),
        in_launch=row.get("in_launch"),
        only_if_on=row.get("on", False),
        with_openmp=row.get("with_openmp"),
    )
