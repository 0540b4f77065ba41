"""The hosts of a run, as hostfiles of MPI, accelerate and DeepSpeed name them: one host a line.

    node1                     accelerate, and every MPI
    node1:2                   Intel MPI, MPICH
    node1 slots=2             Open MPI, DeepSpeed; max_slots and other key=value words are passed over

A name may carry a user (alice@node1). IPv6 addresses with slots stand in brackets: [fd00::1]:2.
"""

from __future__ import annotations

import re
from pathlib import Path

from coremill.errors import InputError

_LINE = re.compile(
    r"""(?P<user>[\w.-]+@)?
        (?: \[(?P<bracketed>[0-9A-Fa-f:.]+)\]
          | (?P<address>[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*)
          | (?P<name>\w[\w.-]*) )
        (?: :(?P<count>\S*) )?
        (?P<pairs> (?: \s+ \w+ \s* = \s* \S+ )* ) $""",
    re.VERBOSE,
)
_SLOTS = re.compile(r"\b(?:slots|cpu|count)\s*=\s*(\S+)", re.IGNORECASE)  # Open MPI takes all three


def read_hostfile(path: str | Path) -> dict[str, int | None]:
    """Hosts in order with their slots, where given; a host named twice counts once, its slots added."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"the hostfile {path} cannot be read", where="--hostfile", why=why or str(error)) from error
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(lines, start=1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        name, count = _read_line(text, f"{path}, line {number}")
        hosts[name] = count if name not in hosts else (hosts[name] or 1) + (count or 1)
    if not hosts:
        raise InputError(
            f"the hostfile {path} names no host", where="--hostfile", do="one host per line, like `node1 slots=2`"
        )
    return hosts


def _read_line(text: str, where: str) -> tuple[str, int | None]:
    """One host and its slots."""
    match = _LINE.match(text)
    if match is None:
        raise InputError(
            f"{text!r} is not a line of a hostfile",
            where=where,
            do="one host per line: node1, node1:2 or node1 slots=2",
        )
    name = (match["user"] or "") + (match["bracketed"] or match["address"] or match["name"])
    named = _SLOTS.search(match["pairs"])
    count = match["count"] if match["count"] is not None else named[1] if named else None
    if count is not None and (not count.isdigit() or int(count) < 1):
        raise InputError(
            f"{text!r} gives no number of slots", where=where, do="a whole number from 1 on, like `node1 slots=2`"
        )
    return name, None if count is None else int(count)
