"""Models below one another, each with a mean and its 95 % interval. Names, not colours, tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedkeep.report.blocks import Drawing
from fedkeep.report.charts import NARROW, WIDE
from fedkeep.report.svg import Canvas, Scale

PITCH, TOP, BOTTOM = 30.0, 8.0, 44.0
BETWEEN = 16.0  # more for a row whose name stands above it


@dataclass(frozen=True, slots=True)
class Rank:
    """A model: name, value as text, mean, interval (None: not known), mark (shape, filled, slot), and hover text."""

    label: str
    text: str
    mean: float
    low: float | None
    high: float | None
    shape: str
    filled: bool
    slot: str
    tip: str


def ranks_chart(
    title: str, ranks: Sequence[Rank], x_label: str, write: Callable[[float], str], zero: str
) -> list[Drawing]:
    """Draw the models in their order; ``zero`` says what the line at 0 is."""
    return [
        Drawing(_draw(title, width, ranks, x_label, write, zero), form)
        for form, width in (("wide", WIDE), ("narrow", NARROW))
    ]


def _draw(
    title: str, width: float, ranks: Sequence[Rank], x_label: str, write: Callable[[float], str], zero: str
) -> str:
    beside = width > 500
    pitch = PITCH if beside else PITCH + BETWEEN
    bottom = TOP + 18 + pitch * len(ranks)
    canvas = Canvas(width, bottom + BOTTOM, title)
    widest = [
        7.2 * max((len(text) for text in texts), default=0)
        for texts in zip(*((r.label, r.text) for r in ranks), strict=True)
    ]
    left = min(widest[0] + 14, 320.0) if beside else 6.0
    right = width - (widest[1] + 14 if beside else 6.0)
    ends = [0.0, *(v for r in ranks for v in (r.mean, r.low, r.high) if v is not None)]
    pad = 0.05 * (max(ends) - min(ends)) or 1.0
    x = Scale(min(ends) - pad, max(ends) + pad, left + 6, right - 6)
    ticks = x.ticks(9 if beside else 4)
    whole = all(write(t).endswith(".0") for t in ticks)
    for t in ticks:
        canvas.add("line", cls="grid", x1=x(t), x2=x(t), y1=TOP + 16, y2=bottom)
        canvas.under(x(t), bottom + 18, write(t).removesuffix(".0") if whole else write(t))
    canvas.add("line", cls="axis", x1=x(0.0), x2=x(0.0), y1=TOP + 16, y2=bottom)
    late = x(0.0) > (left + right) / 2
    canvas.text(x(0.0) + (5 if not late else -5), TOP + 10, zero, "tick", "end" if late else "start")
    for i, r in enumerate(ranks):
        y = TOP + 18 + pitch * (i + 0.5) + (0 if beside else BETWEEN / 2)
        name = "strong halo" if r.filled else "tick halo"
        shown = r.label if len(r.label) <= 44 else f"{r.label[:43]}…"
        canvas.text(4, y + 4 if beside else y - 14, shown, name)
        canvas.text(width - 4, y + 4 if beside else y - 14, r.text, name, "end")
        if r.low is not None and r.high is not None:
            canvas.add("line", cls=f"whisker s{r.slot}", x1=x(r.low), x2=x(r.high), y1=y, y2=y)
        look = "fill" if r.filled else "hollow"
        canvas.mark(x(r.mean), y, 5, r.shape, f"tip {look} s{r.slot}", r.tip)
    canvas.text((left + right) / 2, canvas.height - 6, x_label, "name", "middle")
    return canvas.svg()
