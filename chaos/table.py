"""Rows as a table: on the screen, as JSON that later goes add to, and as the tables of docs/chaos.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from chaos.experiment import COREMILL, Row, quantile

BEGIN, END = "<!-- made by python -m chaos: begin -->", "<!-- made by python -m chaos: end -->"
HEADINGS = ("", "fault", "n", "kept", "detected in", "resumed or ended in", "steps lost", "same bits", "exit code")


def order(row: Row) -> tuple[int, str, str]:
    """X2 before X10; coremill before its peers."""
    number = re.match(r"X(\d+)", row.key)
    return (int(number[1]) if number else 999, row.key, "" if row.system == COREMILL else row.system)


def cells(row: Row) -> list[str]:
    """One line of the table, in words."""
    if row.not_run:
        return [row.key, row.fault, "0", "not run", "", "", "", "", row.not_run]
    bits = {None: "", True: "yes", False: "NO"}[row.same_bits]
    return [
        row.key,
        row.fault,
        str(row.trials),
        f"{row.passed} of {row.trials}",
        seconds_text(row.detected_seconds),
        seconds_text(row.resumed_seconds),
        lost_text(row.steps_lost),
        bits,
        ", ".join(str(code) for code in row.exit_codes),
    ]


def seconds_text(values: Sequence[float]) -> str:
    """Median and, from twenty on, the 95th percentile, else the largest."""
    if not values:
        return ""
    middle = quantile(values, 0.5)
    if len(values) == 1:
        return f"{middle:.1f} s"
    name, high = ("p95", quantile(values, 0.95)) if len(values) >= 20 else ("max", max(values))
    return f"{middle:.1f} s, {name} {high:.1f}"


def lost_text(values: Sequence[int]) -> str:
    """The range of steps that were done again."""
    if not values:
        return ""
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def screen(rows: Iterable[Row]) -> Table:
    """For the terminal."""
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold", justify="right" if heading in ("n", "kept") else "left")
    for row in sorted(rows, key=order):
        name = row.key if row.system == COREMILL else f"{row.key} {row.system}"
        table.add_row(name, *cells(row)[1:], style=None if row.is_good else "bold red")
    return table


# --- JSON: one document that grows ---


def merge(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Put the rows into the file; those of the same experiment are replaced, all others stay."""
    known = {(row.key, row.system): row for row in (read(path) if path.exists() else [])}
    known |= {(row.key, row.system): row for row in rows}
    merged = sorted(known.values(), key=order)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps({"rows": [_to_json(row) for row in merged]}, indent=1) + "\n")
    fresh.replace(path)
    return merged


def read(path: Path) -> list[Row]:
    """The rows of such a file."""
    tuples = ("detected_seconds", "resumed_seconds", "steps_lost", "exit_codes")
    rows = json.loads(path.read_text())["rows"]
    return [Row(**{name: tuple(value) if name in tuples else value for name, value in row.items()}) for row in rows]


def _to_json(row: Row) -> dict[str, Any]:
    document = asdict(row)
    for name in ("detected_seconds", "resumed_seconds"):
        document[name] = [round(value, 3) for value in document[name]]
    return document | {"seconds": round(row.seconds, 1)}


# --- Markdown ---


def markdown(rows: Sequence[Row]) -> str:
    """The tables: coremill's own, then the same faults on its peers."""
    own = sorted((row for row in rows if row.system == COREMILL), key=order)
    blocks = [_pipes(HEADINGS, [cells(row) for row in own]) if own else ""]
    systems = sorted({row.system for row in rows} - {COREMILL})
    if systems:
        blocks.append("### The same faults on the peers\n")
        keys = sorted({row.key: row for row in rows if row.system != COREMILL}.values(), key=order)
        lines = []
        for example in keys:
            by_system = {row.system: row for row in rows if row.key == example.key}
            lines.append(
                [example.key, example.fault, *(told(by_system.get(system)) for system in (COREMILL, *systems))]
            )
        blocks.append(_pipes(("", "fault", COREMILL, *systems), lines))
    machines = sorted({row.machine for row in rows})
    blocks.append("\n".join(f"Measured on: {machine}" for machine in machines))
    return "\n".join(blocks)


def told(row: Row | None) -> str:
    """What happened, each outcome with how often."""
    if row is None or row.not_run:
        return ""
    return "; ".join(f"{text} ({count} of {row.trials})" for text, count in row.outcomes.items())


def write_markdown(path: Path, rows: Sequence[Row]) -> None:
    """Between the marks of a page that has them, else the whole file."""
    text = f"{BEGIN}\n\n{markdown(rows)}\n\n{END}"
    if path.exists() and BEGIN in (page := path.read_text()):
        before, _, rest = page.partition(BEGIN)
        path.write_text(before + text + rest.partition(END)[2])
    else:
        path.write_text(text + "\n")


def _pipes(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings), *rows, ""])
