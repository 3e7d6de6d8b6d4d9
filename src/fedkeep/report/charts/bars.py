"""Ours beside the published, as FURL Fig. 2: a pair of bars a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedkeep.report import wording
from fedkeep.report.blocks import Drawing
from fedkeep.report.charts import NARROW, WIDE
from fedkeep.report.svg import Canvas, Scale

PITCH, HEAD = 66.0, 6.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A method's pair of bars: ours (with its deviation where known) and the published value."""

    label: str
    ours: float | None
    std: float | None
    published: float | None


def bar_chart(title: str, bars: Sequence[Bar], metric: str) -> list[Drawing]:
    """Draw horizontal bars that start at 0, values written at their ends."""
    return [
        Drawing(_draw(width, title, bars, metric), form)
        for form, width in (("wide", WIDE), ("narrow", NARROW))
    ]


def _draw(width: float, title: str, bars: Sequence[Bar], metric: str) -> str:
    canvas = Canvas(width, HEAD + PITCH * len(bars) + 22, title)
    highest = max([v for b in bars for v in (b.ours, b.published) if v is not None], default=0.0)
    x = Scale(0, max(highest, 1e-9), 4, width - 110)
    for i, bar in enumerate(bars):
        top = HEAD + PITCH * i
        canvas.text(4, top + 11, bar.label, "strong")
        ours = wording.spread(bar.ours, bar.std, metric)
        _one(canvas, x, top + 18, bar.ours, ours, "ours", "fill s0", bar.label)
        _one(
            canvas,
            x,
            top + 36,
            bar.published,
            wording.number(bar.published, metric),
            "published",
            "hollow s0",
            bar.label,
        )
    canvas.text(4, canvas.height - 3, f"{wording.metric_name(metric)}; bars start at 0", "name")
    return canvas.svg()


def _one(
    canvas: Canvas, x: Scale, y: float, value: float | None, text: str, who: str, cls: str, label: str
) -> None:
    end = 4.0 if value is None else max(x(value), 5.0)
    if value is not None:
        canvas.add(
            "rect", tip=f"{label}\n{who}: {text}", cls=f"tip {cls}", x=4, y=y, width=end - 4, height=15
        )
    canvas.text(end + 7, y + 12, text)
