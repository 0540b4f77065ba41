"""What is said and counted of sources that are mixed."""

from __future__ import annotations

from coremill.report.sources import source_figures, words_of_data


def source(name: str, rows: int, share: float, asked: float | None) -> dict[str, object]:
    counts = {"documents": 5, "tokens": rows * 8, "evaluation_documents": 0, "evaluation_rows": 0}
    return {"name": name, "rows": rows, "share": share, "share_asked": asked, "passes_per_epoch": 1.0, **counts}


SOURCES = [source("a.csv", 100, 0.75, 0.75), source("b", 10, 0.25, 0.25)]


def test_figures_follow_the_rows_a_run_has_seen() -> None:
    first, second = source_figures(SOURCES, 100)
    assert (first["rows_seen"], second["rows_seen"]) == (75, 25)
    assert (first["share_got"], second["share_got"]) == (0.75, 0.25)
    assert (first["passes"], second["passes"]) == (0.75, 2.5)
    assert [one["share_got"] for one in source_figures(SOURCES, 0)] == [None, None]
    assert source_figures([], 100) == []


def test_rows_of_a_step_are_those_of_the_plan() -> None:
    """Conversations fill their rows differently, and the last step's tokens are of one of all sources' rows."""
    from types import SimpleNamespace

    from coremill.report.summary import _sources

    tally = SimpleNamespace(
        data={"sources": SOURCES}, steps={5: SimpleNamespace(tokens=131)}, last_step=5, plan={"rows_per_step": 20}
    )
    assert [one["rows_seen"] for one in _sources(tally)] == [75, 25]  # type: ignore[arg-type]
    tally.plan = {}  # of an older release
    assert [one["rows_seen"] for one in _sources(tally)] == [60, 20]  # type: ignore[arg-type]


def test_words_say_how_often_rows_are_seen() -> None:
    lines = words_of_data({"sources": SOURCES, "notes": ["a.csv is read so"]}, 100)
    assert lines[0] == "a.csv is read so"
    assert lines[1] == "source a.csv: 75.0 % of the rows; 5 documents in 100 rows, of which the run sees 75, each once"
    assert lines[2].endswith("5 documents in 10 rows, each seen 2 or 3 times (2.50 passes)")
    by_size = [source("a", 30, 0.75, None), source("b", 10, 0.25, None)]
    assert words_of_data({"sources": by_size}, 40)[1].endswith(
        "25.0 % of the rows, by its size; 5 documents in 10 rows, each seen once"
    )
    assert words_of_data({"sources": by_size}, 80)[1].endswith("each seen 2 times (2.00 passes)")
    assert words_of_data({"tokens": 7}, 100) == []
