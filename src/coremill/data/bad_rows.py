"""Rows that cannot be used: the first one ends the run, or all are left out, counted and listed.

Which rows are bad depends on the text alone, so leaving them out gives the same data every time; the choice is part of
the cache key. What is wrong with a whole file (damaged, no such column) always ends the run.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coremill.data.compressed import open_bytes
from coremill.errors import InputError

LISTING_FILE = "bad-rows.jsonl"
LISTED_ROWS = 100_000  # more are only counted
SHOWN_REASONS = 3
OnBadRows = Literal["stop", "skip"]

# The first bytes of files that are something else than their name says, and what to do about each.
_LOOKS_LIKE = (
    (b"\x1f\x8b", "it is compressed with gzip: gunzip it, or add .gz to its name"),
    (b"PK\x03\x04", "it is a zip archive: unzip it first"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstd: unzstd it, or add .zst to its name"),
    (b"\xff\xfe", "it is UTF-16: convert it, for instance: iconv -f utf-16 -t utf-8"),
    (b"\xfe\xff", "it is UTF-16: convert it, for instance: iconv -f utf-16 -t utf-8"),
    (b"PAR1", "it is a parquet file: name it .parquet"),
    (b"version https://git-lfs", "it is a pointer of git-lfs, not the file: run git lfs pull"),
    (b"<!doctype html", "it is a web page, perhaps that of a login: download the file itself"),
    (b"<html", "it is a web page, perhaps that of a login: download the file itself"),
)


def another_cure(path: Path) -> str | None:
    """What to do where the file is not what its name says; None where nothing like that is seen."""
    try:
        with open_bytes(path) as stream:
            start = stream.read(64).lstrip(b"\r\n\t ").lower()
    except (OSError, InputError):
        return None
    cures = (cure for magic, cure in _LOOKS_LIKE if start.startswith(magic.lower()))
    return next((cure for cure in cures if path.suffix.lower() not in cure), None)


class WrongColumn(InputError):
    """A column that the first row of a file lacks: the others lack it too, and leaving them out would leave nothing."""


@dataclass
class BadRows:
    """Takes bad rows while a source is read."""

    policy: OnBadRows = "stop"
    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    listed: list[dict[str, Any]] = field(default_factory=list)

    def take(self, problem: InputError) -> None:
        """Raise it, or leave the row out."""
        if self.policy == "stop" and isinstance(problem, WrongColumn):
            raise problem
        if self.policy == "stop":
            problem.do = f"{problem.do}; --set data.on_bad_rows=skip leaves such rows out"
            raise problem
        self.count += 1
        self.reasons[problem.what] += 1
        if len(self.listed) < LISTED_ROWS:
            self.listed.append({"where": problem.where, "what": problem.what, "why": problem.why})

    def words(self) -> str:
        common = [f"{what} ({count:,})" for what, count in self.reasons.most_common(SHOWN_REASONS)]
        if (others := self.count - sum(count for _, count in self.reasons.most_common(SHOWN_REASONS))) > 0:
            common.append(f"others ({others:,})")
        return f"{self.count:,} bad row{'s' if self.count != 1 else ''} left out: " + ", ".join(common)

    def write(self, folder: Path) -> None:
        """The list of what was left out, where something was."""
        if self.listed:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self.listed)
            (folder / LISTING_FILE).write_text("".join(lines), encoding="utf-8")
