"""Charts of the report pages, drawn here as HTML and SVG so that a page needs no library and no network.

Curves are SVG paths stretched to their box; labels, dots and marks are HTML placed in percent. That way text keeps its
size on a phone, which a scaled drawing would not. What the pointer shows lies with each plot as JSON, for page.js.
Everything that comes from a run is escaped by markupsafe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

SMOOTH_FROM_POINTS = 60  # fewer can be read as they are

Values = Sequence[float | None]


@dataclass(frozen=True)
class Curve:
    """One line; a null in `y` is a gap. `dots` are single measurements that belong to it."""

    name: str
    x: Sequence[float]
    y: Values
    color: int = 0  # of the page's colours for curves
    dots: Sequence[tuple[float, float]] = ()
    dots_name: str = "evaluation"
    is_noisy: bool = True  # a long one is also drawn smoothed


@dataclass(frozen=True)
class Axis:
    """What runs from left to right: how a place on it is said, and how short on its ticks."""

    show: Callable[[float], str]
    tick: Callable[[float], str]


@dataclass(frozen=True)
class Reference:
    """A level to compare with."""

    name: str
    value: float


@dataclass(frozen=True)
class Mark:
    """Something that happened at a place of the axis."""

    kind: str  # save, stop, continuation, restart, failure
    x: float
    text: str


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


STEPS = Axis(show=lambda step: f"step {step:,.0f}", tick=lambda step: f"{step:,.0f}")


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
    title: str,
    description: str,
    curves: Sequence[Curve],
    show: Callable[[float], str],
    axis: Axis = STEPS,
    references: Sequence[Reference] = (),
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    group: str = "steps",
) -> Markup:
    """Curves with round ticks; charts of one `group` have the same axis, and their pointers move together."""
    known = [(x, y) for curve in curves for x, y in (*zip(curve.x, curve.y, strict=True), *curve.dots) if _is_known(y)]
    if not known:
        return Markup('<p class="empty">No steps yet.</p>')
    levels = [y for _, y in known if y is not None] + [reference.value for reference in references]
    ticks = nice_ticks(0.0 if from_zero else min(levels), max(levels))
    low, high = (extreme(x for x, _ in known) for extreme in (min, max))
    frame = _Frame(x_low=low, x_high=max(high, low + 1), y_low=ticks[0], y_high=ticks[-1])
    lines: list[Markup] = []
    legend: list[tuple[str, str]] = []
    for curve in curves:
        drawn, keys = _draw(frame, curve, of_several=len(curves) > 1)
        lines += drawn
        legend += keys
    legend += [(f"key-dash ref-{index}", reference.name) for index, reference in enumerate(references)]
    inside = [mark for mark in marks if frame.x_low <= mark.x <= frame.x_high]
    placed = [
        *(_reference(frame, reference, index) for index, reference in enumerate(references)),
        *(_mark(frame, mark) for mark in inside),
        *(_dot(frame, curve, x, y, axis, show) for curve in curves for x, y in curve.dots),
    ]
    return Markup(
        '<figure class="chart"><figcaption>{legend}</figcaption><div class="plot-row">'
        '<div class="y-axis" aria-hidden="true">{y_labels}</div><div class="plot" tabindex="0" role="group"'
        ' aria-label="{title}: left and right arrow read values" data-group="{group}" data-readout="{readout}">{grid}'
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{title}. {description}">'
        "<title>{title}</title><desc>{description}</desc>{curves}</svg>{marks}</div></div>"
        '<div class="x-axis" aria-hidden="true">{x_labels}</div></figure>'
    ).format(
        legend=_legend(legend),
        readout=json.dumps([_readout(frame, curve, axis, show) for curve in curves], separators=(",", ":")),
        group=group,
        title=title,
        description=description,
        grid=_join(Markup('<i class="grid" style="top:{:.3f}%"></i>').format(frame.top(tick)) for tick in ticks),
        y_labels=_join(
            Markup('<span style="top:{:.3f}%">{}</span>').format(frame.top(tick), show_tick(tick, ticks))
            for tick in ticks
        ),
        x_labels=_x_labels(frame, axis),
        curves=_join(lines),
        marks=_join(placed),
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
    """One level in a bar, with a mark at the limit; one beyond the right end is a dashed mark there."""
    mark = Markup("")
    if limit and whole:
        beyond = " beyond" if limit > whole else ""
        mark = Markup('<b class="limit{}" style="left:{:.3f}%"></b>').format(beyond, 100 * min(1.0, limit / whole))
    return Markup(
        '<div class="bar level" role="img" aria-label="{0}" title="{0}">'
        '<i class="{1}" style="width:{2:.3f}%"></i>{3}</div>'
    ).format(description, css_class, 100 * min(1.0, value / whole) if whole else 0, mark)


def show_tick(tick: float, ticks: Sequence[float]) -> str:
    """A tick with just the decimals its neighbours need; very small and very large ones with an exponent or unit."""
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else 1.0
    largest = max(abs(ticks[0]), abs(ticks[-1]))
    if largest >= 1e6:
        return f"{tick / 1e6:g}M"
    if largest < 0.01:
        return "0" if tick == 0 else f"{tick:.1e}".replace("e-0", "e-").replace(".0e", "e")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1  # steps of 2.5
    return f"{tick:,.{decimals}f}"


def _is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _draw(frame: _Frame, curve: Curve, *, of_several: bool) -> tuple[list[Markup], list[tuple[str, str]]]:
    """A long curve also smoothed, over itself; with what the legend says of it."""
    css, key = f"curve curve-{curve.color}", f"key-line curve-{curve.color}"
    count = sum(_is_known(y) for y in curve.y)
    window = len(curve.x) // 25 if curve.is_noisy and count >= SMOOTH_FROM_POINTS else 0
    dots = [(f"key-dot curve-{curve.color}", curve.dots_name)] if curve.dots and not of_several else []
    if not window:
        return [_path(frame, curve.x, curve.y, css)], [(key, curve.name), *dots]
    lines = [_path(frame, curve.x, curve.y, f"{css} faint"), _path(frame, curve.x, _smooth(curve.y, window), css)]
    if of_several:
        return lines, [(key, curve.name)]
    return lines, [(key, f"{curve.name}, smoothed"), (f"{key} faint", "as measured"), *dots]


def _readout(frame: _Frame, curve: Curve, axis: Axis, show: Callable[[float], str]) -> dict[str, object]:
    """What the pointer shows: places in percent, and words."""
    known = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None and math.isfinite(y)]
    return {
        "name": curve.name,
        "color": curve.color,
        "x": [round(frame.left(x), 2) for x, _ in known],
        "y": [round(frame.top(y), 2) for _, y in known],
        "at": [axis.show(x) for x, _ in known],
        "text": [show(y) for _, y in known],
    }


def _path(frame: _Frame, x: Sequence[float], y: Values, css_class: str) -> Markup:
    commands, pen = [], "M"
    for at, value in zip(x, y, strict=True):
        if value is None or not math.isfinite(value):
            pen = "M"
            continue
        commands.append(f"{pen}{frame.left(at):.2f} {frame.top(value):.2f}")
        pen = "L"
    if len(commands) == 1:
        commands.append("h.01")  # a round line end makes a point of it
    return Markup('<path class="{}" d="{}"/>').format(css_class, "".join(commands))


def _smooth(y: Values, window: int) -> list[float | None]:
    """A centred mean over neighbours that are known; narrower at both ends, so the ends stay where they are."""
    smoothed: list[float | None] = []
    for index in range(len(y)):
        reach = min(window, index, len(y) - 1 - index)
        near = [value for value in y[index - reach : index + reach + 1] if value is not None and math.isfinite(value)]
        smoothed.append(sum(near) / len(near) if near else None)
    return smoothed


def _reference(frame: _Frame, reference: Reference, index: int) -> Markup:
    return Markup('<i class="reference ref-{}" style="top:{:.3f}%"></i>').format(index, frame.top(reference.value))


def _mark(frame: _Frame, mark: Mark) -> Markup:
    return Markup('<i class="mark {}" style="left:{:.3f}%" data-text="{}"></i>').format(
        mark.kind, frame.left(mark.x), mark.text
    )


def _dot(frame: _Frame, curve: Curve, x: float, y: float, axis: Axis, show: Callable[[float], str]) -> Markup:
    return Markup('<i class="dot curve-{}" style="left:{:.3f}%;top:{:.3f}%" data-text="{}"></i>').format(
        curve.color, frame.left(x), frame.top(y), f"{curve.dots_name}, {axis.show(x)}: {show(y)}"
    )


def _legend(entries: Sequence[tuple[str, str]]) -> Markup:
    return _join(Markup('<span><i class="{}"></i>{}</span>').format(css_class, name) for css_class, name in entries)


def _x_labels(frame: _Frame, axis: Axis) -> Markup:
    """First and last place, and round ones between that stay clear of both (12 % of a phone is about 35 pixels)."""
    inner = [tick for tick in nice_ticks(frame.x_low, frame.x_high) if tick == int(tick) and 16 < frame.left(tick) < 86]
    labels = [(frame.x_low, axis.show(frame.x_low)), *((tick, axis.tick(tick)) for tick in inner)]
    labels.append((frame.x_high, axis.tick(frame.x_high)))
    return _join(
        Markup('<span style="left:{:.3f}%">{}</span>').format(frame.left(place), label) for place, label in labels
    )


def _join(pieces: Iterable[Markup]) -> Markup:
    return Markup("").join(pieces)
