"""How a metric is spread over users: one histogram a configuration above a common axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedkeep.report import wording
from fedkeep.report.blocks import Drawing
from fedkeep.report.charts import NARROW, WIDE
from fedkeep.report.svg import Canvas, Scale, nice_ticks

LEFT, HEAD, GAP = 50.0, 20.0, 36.0


@dataclass(frozen=True, slots=True)
class Strip:
    """One histogram: its name, colour slot, and one value a user."""

    label: str
    slot: str
    values: tuple[float, ...]


def spread_chart(title: str, strips: Sequence[Strip], metric: str) -> list[Drawing]:
    """Draw the histograms; heights are shares of a configuration's users."""
    edges = bin_edges([v for s in strips for v in s.values], wording.is_fraction(metric))
    drawings = []
    for form, width, tall in (("wide", WIDE, 66.0), ("narrow", NARROW, 62.0)):
        canvas = Canvas(width, HEAD + len(strips) * (tall + GAP) + 46, title)
        drawings.append(Drawing(_draw(canvas, strips, edges, tall, metric), form))
    return drawings


def bin_edges(values: Sequence[float], fraction: bool, about: int = 20) -> list[float]:
    """Return bin edges: steps of 5 points for fractions, else round steps from the least value to the greatest."""
    if fraction:
        return [i / 20 for i in range(21)]
    edges = nice_ticks(min(values), max(values), about)
    return edges if len(edges) > 1 else [edges[0] - 0.5, edges[0] + 0.5]


def in_bins(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Return how many values lie in each bin of equal width; an edge belongs to the upper bin, the last to the last."""
    counts = [0] * (len(edges) - 1)
    step = (edges[-1] - edges[0]) / len(counts)
    for value in values:
        counts[min(max(int((value - edges[0]) / step + 1e-9), 0), len(counts) - 1)] += 1
    return counts


def _draw(canvas: Canvas, strips: Sequence[Strip], edges: Sequence[float], tall: float, metric: str) -> str:
    counts = [in_bins(s.values, edges) for s in strips]
    highest = max(n / len(s.values) for s, row in zip(strips, counts, strict=True) for n in row)
    tick = max(t for t in nice_ticks(0, highest, 4) if t <= highest)
    right = canvas.width - 12
    x = Scale(edges[0], edges[-1], LEFT, right)
    canvas.text(2, 14, "Share of users (%)", "name")
    for i, (strip, row) in enumerate(zip(strips, counts, strict=True)):
        base = HEAD + (i + 1) * (tall + GAP)
        y = Scale(0, highest, base, base - tall)
        canvas.text(LEFT, base - tall - 9, strip.label, "strong")
        canvas.add("line", cls="grid", x1=LEFT, x2=right, y1=y(tick), y2=y(tick))
        canvas.text(LEFT - 8, y(tick) + 4, f"{100 * tick:.3g} %", anchor="end")
        for j, n in enumerate(row):
            if n:
                a, b = x(edges[j]), x(edges[j + 1])
                tip = _tip(strip, n, edges[j], edges[j + 1], metric)
                top = y(n / len(strip.values))
                width = max(b - a - 2, 1)
                canvas.add(
                    "rect",
                    tip=tip,
                    cls=f"tip fill s{strip.slot}",
                    x=a + 1,
                    y=top,
                    width=width,
                    height=base - top,
                )
        canvas.add("line", cls="axis", x1=LEFT, x2=right, y1=base, y2=base)
        mean = sum(strip.values) / len(strip.values)
        tip = f"{strip.label}\nmean {wording.number(mean, metric)}"
        canvas.mark(x(mean), base + 6, 4.5, "triangle", "tip meanmark", tip=tip)
    bottom = HEAD + len(strips) * (tall + GAP)
    ticks = x.ticks(10 if canvas.width > 500 else 5)
    write = wording.on_axis(ticks, metric)
    for t in ticks:
        canvas.under(x(t), bottom + 25, write(t))
    name = f"{wording.metric_name(metric)} of a user"
    canvas.text((LEFT + right) / 2, canvas.height - 3, name, "name", "middle")
    return canvas.svg()


def _tip(strip: Strip, n: int, low: float, high: float, metric: str) -> str:
    span = f"{wording.number(low, metric, digits=0)} to {wording.number(high, metric, digits=0)}"
    return f"{strip.label}\n{span}\n{wording.count(n, 'user')} ({100 * n / len(strip.values):.1f} %)"
