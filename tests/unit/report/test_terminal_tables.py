import io

import pytest
from rich.console import Console

from coremill.report.plan_screen import render_plan
from coremill.report.terminal import print_heading, print_rows, print_values
from coremill.run.plan_command import show_instances
from unit.report.fake_run import fake_plan

COLUMNS = ("fleet", "fits", "tokens/s")
ROWS = [("1 x c7i.8xlarge", "yes", "59,434"), ("16 x c7i.metal-24xl", "no", "7")]


def shown(width: int, *, terminal: bool, wrapped_column: int | None = None) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    print_rows(console, "cheapest first", COLUMNS, ROWS, wrapped_column=wrapped_column)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "terminal"), [(20, False), (80, False), (80, True)])
def test_columns_are_aligned(width: int, terminal: bool) -> None:
    """Off a terminal whatever the width is taken to be."""
    assert shown(width, terminal=terminal) == [
        "fleet                fits  tokens/s",
        "1 x c7i.8xlarge       yes    59,434",
        "16 x c7i.metal-24xl    no         7",
    ]


def test_a_terminal_too_narrow_for_the_table_cuts_nothing() -> None:
    assert shown(30, terminal=True) == [
        "cheapest first, 1 x",
        "c7i.8xlarge: fits yes,",
        "tokens/s 59,434",
        "cheapest first, 16 x",
        "c7i.metal-24xl: fits no,",
        "tokens/s 7",
    ]


def test_sentences_are_wrapped_on_a_terminal_only() -> None:
    rows = [("engine", "shard", "because " + "it is so " * 20)]
    for terminal in (True, False):
        file = io.StringIO()
        console = Console(file=file, width=60, force_terminal=terminal, color_system=None, legacy_windows=False)
        print_rows(console, "choice", ("", "", ""), rows, wrapped_column=2)
        lines = file.getvalue().splitlines()
        assert all(word in file.getvalue() for word in ("engine", "shard", "because"))
        assert (len(lines) == 1) == (not terminal) and (not terminal or max(map(len, lines)) <= 60)


@pytest.mark.parametrize(("width", "terminal"), [(50, False), (120, True), (50, True)])
def test_long_values_stand_under_each_other(width: int, terminal: bool) -> None:
    """A pager that cuts long lines shows where each begins, and nobody scrolls to the second run."""
    wide = "[{source: " + "a" * 100 + ", share: 0.7}]"
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    print_values(console, ("", "first", "second run"), [("data.sources", wide, "-"), ("train.steps", "10", "20")])
    lines = file.getvalue().splitlines()
    assert lines[0] == "data.sources" and lines[1].startswith("  first       [{source: ") and "  second run  -" in lines
    assert lines[-3:] == ["train.steps", "  first       10", "  second run  20"]
    file.seek(0)
    print_values(console, ("", "first", "second run"), [("train.steps", "10", "20")])
    assert file.getvalue().startswith("             first  second run\ntrain.steps  10     20\n")


def test_through_a_pipe_there_are_no_boxes_colours_or_bars() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80)
    print_heading(console, "a heading")
    render_plan(fake_plan(4, fits=False).to_json(), {"name": "llama", "parameters": 8_030_000_000}, console)
    show_instances(family="c7i", efa=False, live=False, as_json=False, console=console)
    assert file.getvalue().isascii() and "\x1b" not in file.getvalue()
    table = [line for line in file.getvalue().splitlines() if line.startswith(("type ", "c7i."))]
    assert len(table) > 5 and len({len(line) for line in table}) == 1  # the last column ends where its heading does
