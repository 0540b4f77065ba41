"""Charts of the report page, drawn here as HTML and SVG so that the page needs no library and no network.

Curves are SVG paths stretched to their box; labels and dots are HTML placed in percent. That way text keeps its size
on a phone, which a scaled drawing would not. Everything that comes from a run is escaped by markupsafe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

SMOOTH_FROM_POINTS = 60  # fewer can be read as they are


@dataclass(frozen=True)
class Dots:
    """Single measurements on a chart."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Reference:
    """A level to compare with."""

    name: str
    value: float


@dataclass(frozen=True)
class Part:
    """A piece of a stacked bar."""

    name: str
    value: float
    label: str
    css_class: str


@dataclass(frozen=True)
class _Frame:
    """The range a chart shows, and how to place a value in it, in percent."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def left(self, x: float) -> float:
        """Percent from the left edge."""
        return 100 * (x - self.x_low) / ((self.x_high - self.x_low) or 1)

    def top(self, y: float) -> float:
        """Percent from the upper edge."""
        return 100 * (1 - (y - self.y_low) / ((self.y_high - self.y_low) or 1))


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover the range, about `count` of them."""
    if not high > low:
        high = low + (abs(low) or 1.0) * 0.1
        low = low - (abs(low) or 1.0) * 0.1
    raw = (high - low) / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def line_chart(
    *,
    name: str,
    title: str,
    description: str,
    x: Sequence[float],
    y: Sequence[float | None],
    show: Callable[[float], str],
    dots: Dots | None = None,
    references: Sequence[Reference] = (),
    from_zero: bool = False,
) -> Markup:
    """A curve over steps with round ticks; a null in `y` is a gap."""
    known = [(at, value) for at, value in zip(x, y, strict=True) if value is not None and math.isfinite(value)]
    if not known:
        return Markup('<p class="empty">No steps yet.</p>')
    levels = [value for _, value in known] + [reference.value for reference in references]
    levels += [value for _, value in dots.points] if dots else []
    ticks = nice_ticks(0.0 if from_zero else min(levels), max(levels))
    frame = _Frame(x_low=min(x), x_high=max(max(x), min(x) + 1), y_low=ticks[0], y_high=ticks[-1])
    window = len(x) // 25 if len(known) >= SMOOTH_FROM_POINTS else 0
    curves = [_path(frame, x, y, "curve faint" if window else "curve")]
    legend = [("key-line", name)]
    if window:
        curves.append(_path(frame, x, _smooth(y, window), "curve"))
        legend = [("key-line", f"{name}, smoothed"), ("key-line faint", "as measured")]
    marks = [_reference(frame, reference, index) for index, reference in enumerate(references)]
    legend += [(f"key-dash ref-{index}", reference.name) for index, reference in enumerate(references)]
    if dots and dots.points:
        marks += [
            Markup('<i class="dot" style="left:{:.3f}%;top:{:.3f}%" title="{}"></i>').format(
                frame.left(at), frame.top(value), f"{dots.name}, step {at:g}: {show(value)}"
            )
            for at, value in dots.points
        ]
        legend.append(("key-dot", dots.name))
    readout = json.dumps(
        {
            "x": [round(frame.left(at), 3) for at, _ in known],
            "y": [round(frame.top(value), 3) for _, value in known],
            "text": [f"step {at:,.0f}: {show(value)}" for at, value in known],
        },
        separators=(",", ":"),
    )
    return Markup(
        '<figure class="chart"><figcaption>{legend}</figcaption><div class="plot-row">'
        '<div class="y-axis" aria-hidden="true">{y_labels}</div><div class="plot" data-readout="{readout}">{grid}'
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{title}. {description}">'
        "<title>{title}</title><desc>{description}</desc>{curves}</svg>{marks}</div></div>"
        '<div class="x-axis" aria-hidden="true">{x_labels}</div></figure>'
    ).format(
        legend=_legend(legend),
        readout=readout,
        title=title,
        description=description,
        grid=_join(Markup('<i class="grid" style="top:{:.3f}%"></i>').format(frame.top(tick)) for tick in ticks),
        y_labels=_join(
            Markup('<span style="top:{:.3f}%">{}</span>').format(frame.top(tick), show_tick(tick, ticks))
            for tick in ticks
        ),
        x_labels=_x_labels(frame),
        curves=_join(curves),
        marks=_join(marks),
    )


def stacked_bar(parts: Sequence[Part], whole: float | None = None, *, description: str) -> Markup:
    """Parts side by side in one bar; `whole` is the full width, else their sum."""
    full = whole or sum(part.value for part in parts) or 1.0
    pieces = _join(
        Markup('<i class="{}" style="width:{:.3f}%" title="{}: {}"></i>').format(
            part.css_class, 100 * part.value / full, part.name, part.label
        )
        for part in parts
        if part.value > 0
    )
    return Markup('<div class="bar" role="img" aria-label="{}">{}</div>').format(description, pieces)


def level_bar(value: float, whole: float, css_class: str, *, description: str, limit: float | None = None) -> Markup:
    """One level in a bar, with a mark at the limit."""
    mark = (
        Markup('<b class="limit" style="left:{:.3f}%"></b>').format(100 * limit / whole)
        if limit and whole
        else Markup("")
    )
    return Markup(
        '<div class="bar level" role="img" aria-label="{}"><i class="{}" style="width:{:.3f}%"></i>{}</div>'
    ).format(description, css_class, 100 * min(1.0, value / whole) if whole else 0, mark)


def show_tick(tick: float, ticks: Sequence[float]) -> str:
    """A tick with just the decimals its neighbours need."""
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else 1.0
    if max(abs(ticks[0]), abs(ticks[-1])) >= 1e6:
        return f"{tick / 1e6:g}M"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1  # steps of 2.5
    return f"{tick:,.{decimals}f}"


def _path(frame: _Frame, x: Sequence[float], y: Sequence[float | None], css_class: str) -> Markup:
    commands, pen = [], "M"
    for at, value in zip(x, y, strict=True):
        if value is None or not math.isfinite(value):
            pen = "M"
            continue
        commands.append(f"{pen}{frame.left(at):.2f} {frame.top(value):.2f}")
        pen = "L"
    return Markup('<path class="{}" d="{}"/>').format(css_class, "".join(commands))


def _smooth(y: Sequence[float | None], window: int) -> list[float | None]:
    """A centred mean over neighbours that are known; narrower at both ends, so the ends stay where they are."""
    smoothed: list[float | None] = []
    for index in range(len(y)):
        reach = min(window, index, len(y) - 1 - index)
        near = [value for value in y[index - reach : index + reach + 1] if value is not None and math.isfinite(value)]
        smoothed.append(sum(near) / len(near) if near else None)
    return smoothed


def _reference(frame: _Frame, reference: Reference, index: int) -> Markup:
    return Markup('<i class="reference ref-{}" style="top:{:.3f}%"></i>').format(index, frame.top(reference.value))


def _legend(entries: Sequence[tuple[str, str]]) -> Markup:
    return _join(Markup('<span><i class="{}"></i>{}</span>').format(css_class, name) for css_class, name in entries)


def _x_labels(frame: _Frame) -> Markup:
    """First and last step, and round ones between that stay clear of both (12 % of a phone is about 35 pixels)."""
    ends = [frame.x_low, frame.x_high]
    inner = [tick for tick in nice_ticks(frame.x_low, frame.x_high) if tick == int(tick) and 16 < frame.left(tick) < 88]
    labels = [(tick, f"step {tick:,.0f}" if tick == frame.x_low else f"{tick:,.0f}") for tick in sorted(ends + inner)]
    return _join(
        Markup('<span style="left:{:.3f}%">{}</span>').format(frame.left(tick), label) for tick, label in labels
    )


def _join(pieces: Iterable[Markup]) -> Markup:
    return Markup("").join(pieces)
