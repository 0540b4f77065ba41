"""The loss over steps: a chart on a terminal, one line through a pipe, nothing where there is nothing to show."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from coremill.report.loss_plot import render_loss_plot


def shown(steps, losses, *, terminal: bool = True, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=width)
    render_loss_plot({"series": {"step": list(steps), "loss": list(losses)}}, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def dots(line: str) -> int:
    return sum(bin(ord(sign) - 0x2800).count("1") for sign in line if 0x2800 <= ord(sign) < 0x2900)


def test_a_falling_loss_falls_from_the_upper_left_to_the_lower_right():
    lines = shown(range(1, 801), [2.5 + 6 * math.exp(-step / 100) for step in range(800)])
    _, heading, *chart, axis = lines
    assert heading == "Loss over steps" and axis.split() == ["1", "800"]
    assert "8." in chart[0] and "2." in chart[-1]
    assert all(len(line) <= 72 for line in chart)
    first, last = chart[0].partition("┤")[2], chart[-1].partition("┤")[2]
    assert dots(first[:3]) and not dots(first[3:])
    assert dots(last[len(last) // 2 :]) and not dots(last[:3])


@pytest.mark.parametrize("losses", [[3.0, 3.0, 3.0], [4.0, None, 2.0, float("nan"), 1.0], [1.0, 9.0, 1.0, 9.0]])
def test_any_losses_are_drawn(losses):
    lines = shown(range(1, len(losses) + 1), losses)
    assert len(lines) == 10 and sum(map(dots, lines)) > 0


def test_through_a_pipe_it_is_one_line_without_signs_of_its_own():
    (line,) = shown(range(1, 101), [10 - step / 20 for step in range(100)], terminal=False)
    assert line.startswith("loss over steps: step 1 10.0000, step 21 ") and line.endswith("step 100 5.0500")
    assert line.isascii()


def test_a_narrow_terminal_has_the_line():
    assert len(shown(range(1, 9), range(1, 9), width=40)) >= 1
    assert not any(map(dots, shown(range(1, 9), range(1, 9), width=40)))


@pytest.mark.parametrize("losses", [[], [3.0], [3.0, 2.0], [None, None, 3.0, 2.0]])
def test_too_few_losses_show_nothing(losses):
    assert shown(range(1, len(losses) + 1), losses) == []


def test_a_summary_without_a_series_shows_nothing():
    render_loss_plot({}, Console(file=io.StringIO()))
