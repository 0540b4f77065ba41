import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from coremill.errors import InputError
from coremill.report.page.charts import Curve, line_chart, nice_ticks, show_tick
from coremill.report.page.document import show_cpus
from coremill.report.page.run_page import render_page
from coremill.report.show import _write_page
from coremill.report.summary import summarise
from unit.report.fake_run import fake_plan, make_fake_run, write_line, write_report

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Checker(HTMLParser):
    """Every tag is closed in order; ids and attributes that would load something are collected."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize(
    ("world_size", "steps", "ending"),
    [
        (1, 80, "finished"),
        (4, 80, "finished"),
        (4, 60, "failed"),
        (4, 3, "stopped"),
        (4, 1, "running"),
        (1, 0, "running"),
    ],
)
def test_page_is_whole_and_loads_nothing(tmp_path: Path, world_size: int, steps: int, ending: str) -> None:
    write_report(make_fake_run(tmp_path, world_size=world_size, steps=steps, ending=ending))
    page = (tmp_path / "report.html").read_text()
    checker = check(page)
    assert checker.loads == ["data:,"]  # an empty icon, so that the browser asks for none
    assert not re.search(r"https?://|@import|url\(", page)
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page
    assert page.count('role="img"') >= 4


def test_words_from_the_run_are_escaped(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>\"'&"
    make_fake_run(tmp_path, steps=3)
    (tmp_path / "config.yaml").write_text(nasty)
    write_line(tmp_path, 0, "sample", 2e9, prompt=nasty, completion=nasty)
    write_line(tmp_path, 0, "choice", 2e9, name=nasty, value=nasty, reason=nasty)
    write_line(tmp_path, 0, "start", 2e9, world_size=4, hostname=nasty, engine=nasty, dtype=nasty, cpus=nasty)
    write_line(tmp_path, 1, "error", 2e9, message=nasty, traceback=nasty, exit_code=1)
    page = render_page(summarise(tmp_path))
    assert check(page).tags.count("script") == 1  # our own
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_the_page_says_what_the_json_says(tmp_path: Path) -> None:
    summary = write_report(make_fake_run(tmp_path, steps=120, ending="failed"))
    page = (tmp_path / "report.html").read_text()
    assert f"{summary['loss_last']:.4f}" in page
    assert f"{summary['tokens_per_second']:,.0f}" in page
    assert "Failed on rank 2, exit code 70" in page
    assert "the loss is nan at step 120" in page
    assert "bf16 products run 300 times slower" in page


def test_a_plan_alone_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(fake_plan(1).to_json()))
    check(render_page(summarise(tmp_path)))


def test_ticks_are_round_and_cover_the_range() -> None:
    for low, high in ((0.0, 1857.0), (2.86, 8.85), (0.0, 0.003), (5.0, 5.0), (-1.0, 1.0), (0, 3.2e7)):
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 8
        labels = [show_tick(tick, ticks) for tick in ticks]
        assert len(set(labels)) == len(labels)


def test_a_gap_in_a_curve_lifts_the_pen() -> None:
    chart = line_chart(title="t", description="d", curves=[Curve("n", [1, 2, 3, 4], [1.0, None, 2.0, 3.0])], show=str)
    path = re.search(r' d="([^"]*)"', chart)
    assert path is not None and path.group(1).count("M") == 2 and path.group(1).count("L") == 1


def test_cpus_as_ranges() -> None:
    assert show_cpus([0, 1, 2, 8, 10, 11]) == "0-2, 8, 10-11"
    assert show_cpus(None) == "-"


def test_what_other_parts_of_a_summary_say_is_shown(tmp_path: Path) -> None:
    summary = summarise(make_fake_run(tmp_path, steps=120))
    source = {"name": "a.jsonl", "documents": 5, "tokens": 7000, "share_asked": 0.7, "share_got": 0.701, "passes": 1.25}
    more = {"best": {"step": 100, "metrics": {"loss": 1.0}}, "sources": [source], "pause_seconds": 75.0}
    page = render_page({**summary, **more})
    check(page)
    assert "100, best" in page and "paused for 75.0 s" in page
    assert "a.jsonl" in page and "70 %" in page and "1.25" in page


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        _write_page(tmp_path / "file" / "page.html", "")
