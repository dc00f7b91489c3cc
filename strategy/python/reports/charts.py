"""Charts of a run's report as HTML: lines, stacked bars, stacked areas and timelines, without scripts or files.

Texts are HTML and shapes scale with the page, so that a chart is as readable on a phone as on a desktop. Colours are
the classes c0 to c7 of the page's style sheet, which has a light and a dark palette.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

NUM_COLORS = 8
_LARGEST_INTEGER = 1e15
_MOST_LABELS = 5  # below a chart; of more, so many at equal distances are shown
_TICKS = 4  # about so many intervals of an axis
_WIDTH, _HEIGHT = 1000, 240  # of the coordinates of a drawing, which the page stretches

Format = Callable[[float], str]


def escape(text: object) -> str:
    return html.escape(str(text))


def number(value: float) -> str:
    """Return an integer in full, and others with four significant digits, such as "12,345", "1,235" or "0.01235"."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < _LARGEST_INTEGER:
        return f"{int(value):,}"
    digits = f"{value:.4g}"
    return f"{float(digits):,.0f}" if 1000 <= abs(value) < _LARGEST_INTEGER else digits


def num_bytes(value: float) -> str:
    """Return bytes with a decimal unit, such as "1.5 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.4g} B"


def seconds(value: float) -> str:
    """Return a time with a unit, such as "12.5 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.4g} µs"


def ticks(low: float, high: float) -> list[float]:
    """Return round values from at most `low` to at least `high`: steps of 1, 2 or 5 times a power of ten."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        high = low + (abs(low) or 1.0)
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, form: Format = number) -> str:
    """Draw a line for each name of `series`, whose points are (x, y); points that are not finite are left out."""
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return ""
    xs = [x for points in finite.values() for x, _ in points]
    ys = [y for points in finite.values() for _, y in points]
    low, high = min(ys), max(ys)
    y_ticks = ticks(min(0.0, low) if low < 0 or low < 0.5 * high else low, high)
    frame = _Frame(min(xs), max(xs), y_ticks)
    shapes = []
    for i, points in enumerate(finite.values()):
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        if len(points) == 1:  # a line of one point would be invisible
            path = f"0,{frame.y(points[0][1]):.1f} {_WIDTH},{frame.y(points[0][1]):.1f}"
        shapes.append(f'<polyline class="line s{i % NUM_COLORS}" points="{path}"/>')
    return _figure(title, frame, shapes, list(finite) if len(finite) > 1 else [], x_label, form)


def areas(title: str, labels: Sequence[str], layers: Mapping[str, Sequence[float]], form: Format) -> str:
    """Draw the layers, each with a value for each label, on top of each other."""
    sums = [sum(values) for values in zip(*layers.values(), strict=True)]
    frame = _Frame(0, max(1, len(labels) - 1), ticks(0.0, max(sums)))
    below = [0.0] * len(labels)
    shapes = []
    for i, values in enumerate(layers.values()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        outline = [*enumerate(above), *reversed(list(enumerate(below)))]
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in outline)
        shapes.append(f'<polygon class="f{i % NUM_COLORS}" points="{path}"/>')
        below = above
    return _figure(title, frame, shapes, list(layers), "", form, labels)


def bars(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    form: Format,
    marks: Sequence[float | None] = (),
    mark_label: str = "",
) -> str:
    """Draw a horizontal bar of stacked values for each row, (its label, values by name).

    marks: a value for each row, such as its prediction, drawn as a line across the bar.
    """
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    marks = marks or [None] * len(rows)
    longest = max(max(sum(values.values()), mark or 0.0) for (_, values), mark in zip(rows, marks, strict=True))
    longest = longest or 1.0
    parts = [f"<figure><figcaption>{escape(title)}</figcaption>", _legend(names, mark_label)]
    for (label, values), mark in zip(rows, marks, strict=True):
        total = sum(values.values())
        boxes = "".join(
            f'<span class="b{names.index(name) % NUM_COLORS}" style="width:{100 * value / longest:.2f}%" '
            f'title="{escape(name)}: {escape(form(value))}"></span>'
            for name, value in values.items()
            if value > 0
        )
        if mark is not None:
            boxes += f'<i class="mark" style="left:{100 * mark / longest:.2f}%"></i>'
        track = f'<div class="track">{boxes}</div><span>{escape(form(total))}</span>'
        parts.append(f'<div class="bar"><b>{escape(label)}</b>{track}</div>')
    return "".join((*parts, "</figure>"))


def timeline(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str, int]]]], form: Format) -> str:
    """Draw boxes over time for each row, (its label, boxes); a box is (start, end, its text, a tooltip, a color)."""
    end = max((box[1] for _, boxes in rows for box in boxes), default=0.0) or 1.0
    parts = [f"<figure><figcaption>{escape(title)}</figcaption>"]
    for label, boxes in rows:
        drawn = "".join(
            f'<span class="b{color}" style="left:{100 * start / end:.3f}%;width:{100 * (stop - start) / end:.3f}%" '
            f'title="{escape(tip)}">{escape(text)}</span>'
            for start, stop, text, tip, color in boxes
        )
        parts.append(f'<div class="bar"><b>{escape(label)}</b><div class="track time">{drawn}</div></div>')
    parts.append(
        f'<div class="bar"><b></b><div class="ends"><span>0</span><span>{escape(form(end))}</span></div></div>'
    )
    return "".join((*parts, "</figure>"))


class _Frame:
    """The transform from values to the coordinates of a drawing."""

    def __init__(self, first: float, last: float, y_ticks: list[float]) -> None:
        self.first, self.last, self.y_ticks = first, last, y_ticks

    def x(self, value: float) -> float:
        return _WIDTH * (value - self.first) / ((self.last - self.first) or 1.0)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return _HEIGHT * (1 - (value - low) / (high - low))


def _figure(
    title: str,
    frame: _Frame,
    shapes: list[str],
    names: list[str],
    x_label: str,
    form: Format,
    labels: Sequence[str] = (),
) -> str:
    grid = [
        f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{frame.y(tick):.1f}" y2="{frame.y(tick):.1f}"/>'
        for tick in frame.y_ticks
    ]
    texts = [form(tick) for tick in frame.y_ticks]
    if len(set(texts)) < len(texts):  # the ticks differ in later digits
        texts = [f"{tick:.12g}" for tick in frame.y_ticks]
    y_texts = "".join(
        f'<span style="top:{100 * frame.y(tick) / _HEIGHT:.2f}%">{escape(text)}</span>'
        for tick, text in zip(frame.y_ticks, texts, strict=True)
    )
    x_texts: Sequence[str] = labels or [number(frame.first), x_label, number(frame.last)]
    if len(x_texts) > _MOST_LABELS:
        last = len(x_texts) - 1
        x_texts = [x_texts[round(i * last / (_MOST_LABELS - 1))] for i in range(_MOST_LABELS)]
    below = "".join(f"<span>{escape(text)}</span>" for text in x_texts)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{_legend(names)}"
        f'<div class="plot"><div class="ys">{y_texts}</div>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f'{"".join((*grid, *shapes))}</svg></div><div class="xs">{below}</div></figure>'
    )


def _legend(names: Sequence[str], mark_label: str = "") -> str:
    entries = [f'<span><i class="b{i % NUM_COLORS}"></i>{escape(name)}</span>' for i, name in enumerate(names)]
    if mark_label:
        entries.append(f'<span><i class="mark"></i>{escape(mark_label)}</span>')
    return f'<div class="legend">{"".join(entries)}</div>' if entries else ""
