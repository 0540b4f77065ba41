"""Sources that are mixed by shares: what each gave to a run, by the rows it has seen; in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coremill.data.mixing import Mix
from coremill.report.terminal import format_share

COUNTS = (
    *("name", "documents", "rows", "tokens", "evaluation_documents", "evaluation_rows"),
    *("share_asked", "share", "passes_per_epoch"),
)


def source_figures(sources: Sequence[Mapping[str, Any]], rows_seen: int) -> list[dict[str, Any]]:
    """Each source of the event `data` after `rows_seen` rows of the run: rows it gave, their share, passes over it."""
    taken = Mix(tuple(float(source["share"]) for source in sources)).taken(rows_seen) if sources else ()
    return [
        {name: source.get(name) for name in COUNTS}
        | {"rows_seen": rows, "share_got": rows / rows_seen if rows_seen else None, "passes": rows / source["rows"]}
        for source, rows in zip(sources, taken, strict=True)
    ]


def kind_of_documents(counts: Mapping[str, Any]) -> str:
    """What the documents of the event `data` are called, for people."""
    return "conversations" if counts.get("learn") else "documents"


def words_of_data(counts: Mapping[str, Any], rows_of_run: int) -> list[str]:
    """What the screen says of the data before a run of so many rows: how files are read, how often sources are used."""
    lines = [str(note) for note in counts.get("notes") or ()]
    kind = kind_of_documents(counts)
    for source in source_figures(counts.get("sources") or (), rows_of_run):
        asked = "" if source["share_asked"] is not None else ", by its size"
        lines.append(
            f"source {source['name']}: {format_share(source['share'])} of the rows{asked}; {source['documents']:,}"
            f" {kind} in {source['rows']:,} rows, {words_of_use(source)}"
        )
    return lines


def words_of_use(source: Mapping[str, Any]) -> str:
    """How often a run sees the rows of a source."""
    seen, rows = source["rows_seen"], source["rows"]
    if seen <= rows:
        return "each seen once" if seen == rows else f"of which the run sees {seen:,}, each once"
    times = f"{seen // rows} times" if seen % rows == 0 else f"{seen // rows} or {seen // rows + 1} times"
    return f"each seen {times} ({source['passes']:.2f} passes)"
