"""Curves over a common axis: learning curves, cold start, aggregation time.

More curves than there are colours differ by dashes and marks too, and where there is room each is named at its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fedkeep.report import wording
from fedkeep.report.blocks import Drawing
from fedkeep.report.charts import NARROW, PANEL, SLOTS, WIDE, mark_of
from fedkeep.report.svg import Canvas, Scale, nice_ticks, spaced

MOST = 200  # places on one curve; a longer one is shown by means of equal parts
FORMS = {"wide": (WIDE, 340.0), "narrow": (NARROW, 280.0), "panel": (PANEL, 300.0)}


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: places, values, and where known a band from ``low`` to ``high``."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    slot: str
    dashed: bool = False
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Axes:
    """What the axes of a line chart say.

    Attributes:
        x_label, y_label: with units.
        metric: says how y is written, and that a fraction stays within 0 and 1.
        y_format: how y is written, if not by its metric.
        hover_x: the word before x in hover texts.
        x_names: names of the places 0, 1, 2 .. where x is a list of cases and not a quantity.
        log: both axes by logarithm.
        marks: draw each point.
        references: values to compare with, and their names.
    """

    x_label: str
    y_label: str
    metric: str = ""
    y_format: Callable[[float], str] | None = None
    hover_x: str = ""
    x_names: tuple[str, ...] = ()
    log: bool = False
    marks: bool = False
    references: tuple[tuple[float, str], ...] = ()

    def x_text(self, value: float) -> str:
        """Write a place of x."""
        return self.x_names[int(value)] if self.x_names else wording.plain(round(value, 4))

    def y_text(self, value: float) -> str:
        """Write a value of y."""
        return self.y_format(value) if self.y_format else wording.number(value, self.metric)

    def y_tick(self, ticks: Sequence[float]) -> Callable[[float], str]:
        """Return how ticks are written."""
        return self.y_format or wording.on_axis(ticks, self.metric)


def line_chart(
    title: str, series: Sequence[Series], axes: Axes, forms: Sequence[str] = ("wide", "narrow")
) -> list[Drawing]:
    """Draw curves, with a hover text at every place that names each curve's value."""
    thin = [thinned(s) for s in series if s.x]
    return [Drawing(_Chart(Canvas(*FORMS[form], title), thin, axes).draw(), form) for form in forms]


def thinned(series: Series) -> Series:
    """Return a curve of at most `MOST` places: of a longer one the means of equal parts."""
    n = len(series.x)
    if n <= MOST:
        return series
    cuts = [i * n // MOST for i in range(MOST + 1)]

    def means(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)) if values else ()

    return replace(
        series, x=means(series.x), y=means(series.y), low=means(series.low), high=means(series.high)
    )


class _Chart:
    """One drawing of a line chart: margins and scales, then grid, curves and hover bands."""

    def __init__(self, canvas: Canvas, series: Sequence[Series], axes: Axes) -> None:
        self.canvas, self.series, self.axes = canvas, series, axes
        self.roomy = canvas.width > 500
        self.xs = sorted({x for s in series for x in s.x})
        self.top, self.bottom = 36.0, canvas.height - 44
        low, high = _y_range(series, axes)
        self.y = Scale(low, high, self.bottom, self.top, axes.log)
        self.y_ticks = self.y.ticks(5 if self.roomy else 4)
        self.y_tick = axes.y_tick(self.y_ticks)
        self.left = 14 + 7.2 * max((len(self.y_tick(t)) for t in self.y_ticks), default=3)
        self.many = len(series) > SLOTS
        self.named = self.many and self.roomy
        widest = max((len(s.label) for s in series), default=0)
        self.right = canvas.width - (28 + min(7.6 * widest, 224) if self.named else 12)
        self.x = self._x_scale()

    def draw(self) -> str:
        """Return the SVG."""
        self._grid()
        for value, name in self.axes.references:
            if self.y.low <= value <= self.y.high:
                place = self.y(value)
                self.canvas.add("line", cls="reference", x1=self.left, x2=self.right, y1=place, y2=place)
                self.canvas.text(self.right, place - 6, name, "halo", "end")
        for s in self.series:
            self._curve(s)
        if self.named:
            self._name_ends()
        self._hover()
        return self.canvas.svg()

    def _x_scale(self) -> Scale:
        if self.axes.x_names:
            pad = (self.right - self.left) / len(self.axes.x_names) / 2
            return Scale(0, len(self.axes.x_names) - 1, self.left + pad, self.right - pad)
        low, high = self.xs[0], self.xs[-1]
        if self.axes.log:
            return Scale(low / 1.2, high * 1.2, self.left, self.right, log=True)
        return Scale(low, high, self.left + 8, self.right - 8)

    def _grid(self) -> None:
        canvas, left, right, bottom = self.canvas, self.left, self.right, self.bottom
        canvas.text(2, 16, self.axes.y_label, "name")
        for t in self.y_ticks:
            canvas.add("line", cls="grid", x1=left, x2=right, y1=self.y(t), y2=self.y(t))
            canvas.text(left - 8, self.y(t) + 4, self.y_tick(t), anchor="end")
        canvas.add("line", cls="axis", x1=left, x2=right, y1=bottom, y2=bottom)
        names = self.axes.x_names
        ticks = [float(i) for i in range(len(names))] if names else self.x.ticks(9 if self.roomy else 5)
        room = 8 + 7 * max((len(self.axes.x_text(t)) for t in ticks), default=1)
        for t in spaced(ticks, [self.x(t) for t in ticks], room):
            place, text = self.x(t), self.axes.x_text(t)
            canvas.add("line", cls="axis", x1=place, x2=place, y1=bottom, y2=bottom + 4)
            canvas.under(place, bottom + 18, text)
        canvas.text((left + right) / 2, canvas.height - 6, self.axes.x_label, "name", "middle")

    def _curve(self, s: Series) -> None:
        places = [(self.x(a), self.y(b)) for a, b in zip(s.x, s.y, strict=True)]
        up = [(self.x(a), self._inside(b)) for a, b in zip(s.x, s.high, strict=bool(s.high))]
        down = [(self.x(a), self._inside(b)) for a, b in zip(s.x, s.low, strict=bool(s.low))]
        if self.many:
            pass  # bands of so many curves would hide them
        elif up and len(places) > 1 and not self.axes.x_names:
            self.canvas.add("path", cls=f"band s{s.slot}", d=_path(up + down[::-1]) + "Z")
        elif up:
            for (a, b), (_, c) in zip(up, down, strict=True):
                self.canvas.add("line", cls=f"whisker s{s.slot}", x1=a, x2=a, y1=b, y2=c)
        if len(places) > 1:
            self.canvas.add("path", cls=f"line s{s.slot}" + (" dashed" if s.dashed else ""), d=_path(places))
        if self.axes.marks or len(places) == 1:
            for a, b in places:
                self.canvas.mark(a, b, 3.5, "circle", f"fill s{s.slot}")
        elif self.many:
            for i in sorted({round(share * (len(places) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)}):
                self.canvas.mark(*places[i], 4, mark_of(s.slot), f"fill s{s.slot}")

    def _inside(self, value: float) -> float:
        """Return the height of a band's or whisker's end, which may lie beyond the axis: a share below 0."""
        return self.y(min(max(value, self.y.low), self.y.high))

    def _name_ends(self) -> None:
        """Write each curve's name beside its last point; names keep a distance, and a line leads to each."""
        ends = sorted((self.y(s.y[-1]), i) for i, s in enumerate(self.series))
        places = apart([place for place, _ in ends], 14.0, self.top, self.bottom + 30)
        for (y, i), place in zip(ends, places, strict=True):
            s = self.series[i]
            x = self.x(s.x[-1])
            edge = self.right + 14
            self.canvas.add("line", cls=f"whisker s{s.slot}", x1=x + 5, x2=edge, y1=y, y2=place)
            self.canvas.mark(edge + 4, place, 4, mark_of(s.slot), f"fill s{s.slot}")
            self.canvas.text(edge + 12, place + 4, s.label if len(s.label) <= 30 else f"{s.label[:29]}…")

    def _hover(self) -> None:
        """Add a band around each place of x that shows a guide, the curves' points and their values."""
        xs = self.xs if len(self.xs) <= MOST else [self.xs[i * len(self.xs) // MOST] for i in range(MOST)]
        near = (xs[-1] - xs[0]) / 60
        for i, value in enumerate(xs):
            start = (self.x(xs[i - 1]) + self.x(value)) / 2 if i else self.x(value) - 8
            end = (self.x(value) + self.x(xs[i + 1])) / 2 if i + 1 < len(xs) else self.x(value) + 8
            here = [(s, j) for s in self.series if (j := _nearest(s.x, value, near)) is not None]
            here.sort(key=lambda pair: -pair[0].y[pair[1]])
            lines = [f"{self.axes.hover_x or self.axes.x_label} {self.axes.x_text(value)}"]
            lines += [self._said(s, j) for s, j in here]
            self.canvas.open("g", "tip step", "\n".join(lines))
            height = self.bottom - self.top
            self.canvas.add("rect", cls="hit", x=start, y=self.top, width=max(end - start, 1), height=height)
            self.canvas.add(
                "line", cls="guide", x1=self.x(value), x2=self.x(value), y1=self.top, y2=self.bottom
            )
            for s, j in here:
                self.canvas.mark(self.x(s.x[j]), self.y(s.y[j]), 4, "circle", f"dot s{s.slot}")
            self.canvas.close("g")

    def _said(self, s: Series, j: int) -> str:
        text = self.axes.y_text
        words = [s.label, text(s.y[j]), f"({text(s.low[j])} to {text(s.high[j])})" if s.low else ""]
        return " ".join(filter(None, words))


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return ascending places moved as little as needed so that neighbours are ``gap`` apart, within low and high.

    Where there is no room for all, they stand closer.
    """
    if len(places) > 1:
        gap = min(gap, (high - low) / (len(places) - 1))
    out: list[float] = []
    for place in places:
        out.append(max(place, out[-1] + gap if out else low))
    for i in range(len(out) - 1, -1, -1):
        out[i] = min(out[i], out[i + 1] - gap if i + 1 < len(out) else high)
    return out


def _nearest(xs: Sequence[float], value: float, within: float) -> int | None:
    """Return the index of the place nearest to a value, or None where none is within a distance."""
    i = bisect_left(xs, value)
    best = min((j for j in (i - 1, i) if 0 <= j < len(xs)), key=lambda j: abs(xs[j] - value), default=None)
    return best if best is not None and abs(xs[best] - value) <= within else None


def _y_range(series: Sequence[Series], axes: Axes) -> tuple[float, float]:
    values = [v for s in series for v in (*s.y, *s.low, *s.high)] + [value for value, _ in axes.references]
    if axes.log:
        return min(v for v in values if v > 0) / 1.3, max(values) * 1.3
    low, high = min(values), max(values)
    if 0 < low < 0.6 * high:
        low = 0.0
    pad = (high - low or abs(high) or 1.0) * 0.06
    low, high = min(low, nice_ticks(low - pad if low else low, high, 5)[0]), high + pad
    return (max(low, 0.0), min(high, 1.0)) if wording.is_fraction(axes.metric) else (low, high)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in places)
