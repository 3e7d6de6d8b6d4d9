"""Axes and marks of the page's charts: scales, ticks and a canvas that writes SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

SHAPES = ("circle", "square", "triangle", "diamond", "down", "plus", "cross", "star")


class Canvas:
    """Collects SVG elements; every text and attribute is escaped."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        start = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}"'
        self._parts = [f'{start} style="max-width:{width:g}px">']

    def add(self, tag: str, text: str | None = None, tip: str = "", **attributes: str | float) -> None:
        """Add an element; ``tip`` is its hover text. Attributes are named with ``_`` for ``-``, ``cls`` for class."""
        named = {("class" if k == "cls" else k.replace("_", "-")): v for k, v in attributes.items()}
        inside = "".join(
            f' {k}="{_short(v) if isinstance(v, int | float) else escape(v)}"'
            for k, v in named.items()
            if v != ""
        )
        body = (f"<title>{escape(tip)}</title>" if tip else "") + (escape(text) if text is not None else "")
        self._parts.append(f"<{tag}{inside}>{body}</{tag}>" if body else f"<{tag}{inside}/>")

    def text(self, x: float, y: float, text: str, cls: str = "tick", anchor: str = "start") -> None:
        """Add a text with its baseline at (x, y)."""
        self.add("text", text, x=x, y=y, cls=cls, text_anchor="" if anchor == "start" else anchor)

    def under(self, x: float, y: float, text: str) -> None:
        """Add a tick's text below an axis, in the middle of x where the canvas has room for it."""
        late = x + 3.6 * len(text) > self.width
        self.text(self.width if late else x, y, text, anchor="end" if late else "middle")

    def open(self, tag: str, cls: str, tip: str = "") -> None:
        """Open a group; ``close`` ends it."""
        self._parts.append(
            f'<{tag} class="{escape(cls)}">' + (f"<title>{escape(tip)}</title>" if tip else "")
        )

    def close(self, tag: str) -> None:
        """Close the group opened last."""
        self._parts.append(f"</{tag}>")

    def mark(
        self, x: float, y: float, r: float, shape: str, cls: str, tip: str = "", user: int | None = None
    ) -> None:
        """Add a mark of one of `SHAPES`, about as large for each shape."""
        who = "" if user is None else str(user)
        if shape == "circle":
            self.add("circle", tip=tip, cls=cls, cx=x, cy=y, r=r, data_u=who)
        else:
            self.add("path", tip=tip, cls=cls, d=shape_path(shape, x, y, r), data_u=who)

    def svg(self) -> str:
        """Return the whole drawing."""
        return "".join(self._parts) + "</svg>"


def shape_path(shape: str, x: float, y: float, r: float) -> str:
    """Return the outline of a shape around (x, y) as SVG path data."""
    points: list[tuple[float, float]] = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "triangle": [(0, -1.2), (1.15, 0.8), (-1.15, 0.8)],
        "down": [(0, 1.2), (1.15, -0.8), (-1.15, -0.8)],
        "diamond": [(0, -1.3), (1.1, 0), (0, 1.3), (-1.1, 0)],
        "plus": _cross(0.42, 1.2, 0.0),
        "cross": _cross(0.42, 1.2, math.pi / 4),
        "star": [
            (
                (1.35 if i % 2 == 0 else 0.6) * math.sin(i * math.pi / 5),
                -(1.35 if i % 2 == 0 else 0.6) * math.cos(i * math.pi / 5),
            )
            for i in range(10)
        ],
    }[shape]
    return "M" + "L".join(f"{_short(x + r * a)},{_short(y + r * b)}" for a, b in points) + "Z"


def _cross(thin: float, far: float, turn: float) -> list[tuple[float, float]]:
    arm = [(-thin, -far), (thin, -far), (thin, -thin)]
    out = []
    for quarter in range(4):
        angle = quarter * math.pi / 2 + turn
        out += [
            (a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle))
            for a, b in arm
        ]
    return out


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to places on a canvas, in proportion or by logarithm.

    Attributes:
        low, high: the values at ``start`` and ``end``.
        start, end: places in canvas units.
        log: by logarithm; low and high are then positive.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return a value's place."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """Return round values between low and high, about as many as asked."""
        if self.log:
            return log_ticks(self.low, self.high, about)
        slack = 1e-9 * (self.high - self.low)
        return [
            t
            for t in nice_ticks(self.low, self.high, about)
            if self.low <= t + slack and t <= self.high + slack
        ]


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten that cover [low, high], about as many as asked."""
    if not high > low:
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return powers of ten between low and high, thinned; also 2 and 5 times them on a short range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**p for p in range(first, last + 1)]
    inside = [p for p in powers if low * 0.999 <= p <= high * 1.001]
    if len(inside) < 3:
        fine = [m * p for p in powers for m in (1, 2, 5)]
        inside = [p for p in fine if low * 0.999 <= p <= high * 1.001]
    return inside[:: max(1, math.ceil(len(inside) / max(about, 1)))]


def spaced(values: Sequence[float], places: Sequence[float], gap: float) -> list[float]:
    """Return values whose places are at least ``gap`` from the one kept before; the last is always kept."""
    kept: list[int] = []
    for i, place in enumerate(places):
        if not kept or abs(place - places[kept[-1]]) >= gap:
            kept.append(i)
    last = len(places) - 1
    if kept and kept[-1] != last:
        if len(kept) > 1:
            kept.pop()
        kept.append(last)
    return [values[i] for i in kept]


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
