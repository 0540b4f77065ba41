"""The loss over the steps of a run as a small chart of braille dots; where there is no room for one, as one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from coremill.report.terminal import format_loss, print_heading, print_line

ROWS, NARROWEST, WIDEST = 7, 50, 72  # of characters, the labels of the axis among them
NAMED_POINTS = 6  # of the line
_LEFT, _RIGHT = (0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)  # the dots of a braille character, top to bottom


def render_loss_plot(summary: Mapping[str, Any], console: Console) -> None:
    """Show it; nothing where there are fewer than three losses to show."""
    series = summary.get("series") or {}
    points = [
        (int(step), float(loss))
        for step, loss in zip(series.get("step") or (), series.get("loss") or (), strict=True)
        if loss is not None and math.isfinite(loss)
    ]
    if len(points) < 3:
        return
    if not console.is_terminal or console.width < NARROWEST or not console.encoding.lower().startswith("utf"):
        at = sorted({round(index * (len(points) - 1) / (NAMED_POINTS - 1)) for index in range(NAMED_POINTS)})
        named = ", ".join(f"step {points[index][0]:,} {format_loss(points[index][1])}" for index in at)
        print_line(console, f"loss over steps: {named}")
        return
    print_heading(console, "Loss over steps")
    margin = max(len(format_loss(loss)) for _, loss in points)
    columns = min(WIDEST, console.width) - margin - 2
    curve = _curve(points, 2 * columns)
    labels = [format_loss(max(curve)), *[""] * (ROWS - 2), format_loss(min(curve))]
    for label, line in zip(labels, _braille(curve, 4 * ROWS), strict=True):
        console.print(Text.assemble((f"{label:>{margin}} ┤", "dim"), (line, "cyan")), soft_wrap=True)
    first, last = f"{points[0][0]:,}", f"{points[-1][0]:,}"
    console.print(Text(f"{'':{margin}}  {first}{last:>{columns - len(first)}}", style="dim"), soft_wrap=True)


def _curve(points: Sequence[tuple[int, float]], width: int) -> list[float]:
    """The loss in each of so many columns: the mean of those that fall there, else on the way between neighbours."""
    first, last = points[0][0], points[-1][0]
    losses: dict[int, list[float]] = {}
    for step, loss in points:
        losses.setdefault(round((step - first) / max(1, last - first) * (width - 1)), []).append(loss)
    known = {column: sum(found) / len(found) for column, found in losses.items()}
    curve, before = [], 0
    for column in range(width):
        before = column if column in known else before
        after = next(each for each in range(column, width) if each in known)
        share = (column - before) / (after - before) if after > before else 0.0
        curve.append(known[before] + share * (known[after] - known[before]))
    return curve


def _braille(curve: Sequence[float], height: int) -> list[str]:
    """Two columns and four rows of dots a character; neighbours are joined, so that a steep fall is a line too."""
    low, extent = min(curve), (max(curve) - min(curve)) or 1.0
    dots = [round((1 - (value - low) / extent) * (height - 1)) for value in curve]
    cells = [[0x2800] * ((len(dots) + 1) // 2) for _ in range(height // 4)]
    for column, dot in enumerate(dots):
        former = dots[max(0, column - 1)]
        for row in range(min(dot, former + (dot > former)), max(dot, former - (dot < former)) + 1):
            cells[row // 4][column // 2] |= (_RIGHT if column % 2 else _LEFT)[row % 4]
    return ["".join(map(chr, row)) for row in cells]
