"""Numbers and lines as people read them: one way to write bytes, seconds, rates and dollars on screen and page.

Units are decimal (1 GB = 10^9 bytes) everywhere, as in the plan and in the instance table.
Findings are laid out in tables. Off a terminal (a pipe, a log) these are plain text in aligned columns, one finding is
one line and nothing is wrapped; on a terminal too narrow for a table each of its rows becomes a sentence, so that no
value is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from rich.console import Console
from rich.table import Table
from rich.text import Text

NONE = "-"
GAP = 2  # blanks between columns
WIDEST_IN_A_PIPE = 120  # columns of a pager on an ordinary screen
NARROWEST_SENTENCE = 24  # a column of sentences is wrapped, but not below so many characters
_SCALE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_bytes(count: float | None) -> str:
    """2.34 GB, 512 MB, 17 kB."""
    return _scaled(count, "B") if _known(count) else NONE


def format_flops(rate: float | None) -> str:
    """1.43 TFLOP/s."""
    return _scaled(rate, "FLOP/s") if _known(rate) else NONE


def format_count(count: float | None) -> str:
    """A number of things, whole, with thousands separated: 1,432; large ones scaled: 8.03 B."""
    if not _known(count):
        return NONE
    if abs(count) >= 1e9:
        return f"{_three_digits(count / 1e9)} B"
    if abs(count) >= 1e7:
        return f"{_three_digits(count / 1e6)} M"
    return f"{count:,.0f}"


def format_rate(rate: float | None, unit: str = "tokens/s") -> str:
    """1,432 tokens/s; below 100 with one or two decimals, because a slow run moves in those."""
    if not _known(rate):
        return NONE
    number = f"{rate:,.0f}" if rate >= 100 else _three_digits(rate)
    return f"{number} {unit}".rstrip()


def format_seconds(seconds: float | None) -> str:
    """A duration: 84 ms, 3.2 s, 3m 12s, 2h 05m, 1d 03h."""
    if not _known(seconds):
        return NONE
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 99.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def format_percent(fraction: float | None) -> str:
    """78 %; below ten percent with one decimal."""
    if not _known(fraction):
        return NONE
    percent = 100 * fraction
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or percent == 0 else f"{percent:.1f} %"


def format_share(fraction: float | None) -> str:
    """70.0 %: shares are compared, so all have one decimal."""
    return f"{100 * fraction:.1f} %" if _known(fraction) else NONE


def format_usd(dollars: float | None) -> str:
    """$4.31; below a cent what is left of it."""
    if not _known(dollars):
        return NONE
    return f"${dollars:,.2f}" if dollars >= 0.01 or dollars == 0 else f"${dollars:.4f}"


def format_loss(loss: float | None) -> str:
    """Four decimals for reading; the events hold full precision. nan and inf are shown as such."""
    return NONE if loss is None else f"{loss:.4f}"


def format_epochs(epochs: float | None) -> str:
    """Passes over the data: 1, 0.53, 12.4."""
    if not _known(epochs):
        return NONE
    return f"{epochs:,.0f}" if epochs == round(epochs) else _three_digits(epochs)


def format_learning_rate(rate: float | None) -> str:
    """2.00e-05."""
    return NONE if not _known(rate) else "0" if rate == 0 else f"{rate:.2e}"


def format_norm(norm: float | None) -> str:
    """Three digits: 0.0123, 1.23, 345; nan and inf are shown as such."""
    return NONE if norm is None else f"{norm:.3g}"


def format_difference(measured: float | None, planned: float | None) -> str:
    """How far the measured number is off the planned one: +7 %."""
    if not _known(measured) or not _known(planned) or planned == 0:
        return NONE
    percent = 100 * (measured / planned - 1)
    if abs(percent) < 0.05:
        return "0 %"
    return f"{percent:+.1f} %" if abs(percent) < 9.95 else f"{percent:+.0f} %"


def bar(fraction: float, width: int) -> str:
    """A bar of block characters, in eighths, padded to its width; over 1 it is full."""
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    whole, part = divmod(eighths, 8)
    text = "█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else "")
    return text.ljust(width, "░") if whole < width else text


def print_line(console: Console, text: Text | str, style: str = "") -> None:
    """One finding. Off a terminal it is never wrapped; on one it may be, at words."""
    line = Text(text, style=style) if isinstance(text, str) else text
    console.print(line, soft_wrap=not console.is_terminal, highlight=False)


def print_verbatim(console: Console, text: str, style: str = "") -> None:
    """A line to copy: never wrapped, on a terminal neither."""
    console.print(Text(text, style=style), soft_wrap=True, highlight=False)


def print_heading(console: Console, text: str) -> None:
    """Opens a part of a screen."""
    console.print()
    console.print(Text(text, style="bold"), soft_wrap=True)


def print_rows(
    console: Console,
    part: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    wrapped_column: int | None = None,
) -> None:
    """Rows as a table; on a terminal too narrow for it as sentences: "part, row: column value, column value".

    The first column names the row. Columns hold numbers, aligned right, unless one of them
    is named as the column that holds sentences and may be wrapped.
    """
    widths = widths_of(columns, rows)
    least = sum(widths) + GAP * (len(widths) - 1)
    if wrapped_column is not None:
        least += min(NARROWEST_SENTENCE, widths[wrapped_column]) - widths[wrapped_column]
    if not console.is_terminal:
        for line in _aligned(columns, rows, widths, numbers=wrapped_column is None):
            print_line(console, line)
    elif least > console.width:
        for row in rows:
            if sentence := _as_sentence(part, columns, row, wrapped_column):
                print_line(console, sentence)
    else:
        console.print(_table(columns, rows, wrapped_column))


def widths_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Of the columns of a table."""
    return [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]


def print_values(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Texts of any length to compare, one column each: as a table, aligned left; where one line would be too wide for
    a screen (of `less -S` too) each row under a line with its name, a line for each value."""
    widths = widths_of(columns, rows)
    screen = console.width if console.is_terminal else WIDEST_IN_A_PIPE
    if sum(widths) + GAP * (len(widths) - 1) <= screen:
        for line in _aligned(columns, rows, widths, numbers=False):
            print_verbatim(console, line)
        return
    label = max(len(column) for column in columns[1:])
    for name, *values in rows:
        print_verbatim(console, name)
        for column, value in zip(columns[1:], values, strict=True):
            print_line(console, f"  {column.ljust(label)}  {value}")


def _aligned(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], *, numbers: bool
) -> Iterator[str]:
    for row in (columns, *rows) if any(columns[1:]) else rows:
        cells = [
            cell.rjust(width) if numbers and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield (" " * GAP).join(cells).rstrip()


def _as_sentence(part: str, columns: Sequence[str], row: Sequence[str], wrapped_column: int | None) -> str:
    name, *values = row
    pairs = [
        value if index == wrapped_column or not column else f"{column} {value}"
        for index, (column, value) in enumerate(zip(columns[1:], values, strict=True), start=1)
        if value.strip() not in ("", NONE)
    ]
    return "" if not pairs else f"{part}, {name}: {', '.join(pairs)}" if part else f"{name}: {', '.join(pairs)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], wrapped_column: int | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=any(columns[1:]), header_style="dim")
    for index, column in enumerate(columns):
        words = index == 0 or wrapped_column is not None
        table.add_column(column, justify="left" if words else "right", no_wrap=index != wrapped_column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _scaled(value: float, unit: str) -> str:
    for size, prefix in _SCALE:
        if abs(value) >= size * 0.9995:
            return f"{_three_digits(value / size)} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _three_digits(value: float) -> str:
    """Three figures where they fit: 8.03, 37.9, 512."""
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"
