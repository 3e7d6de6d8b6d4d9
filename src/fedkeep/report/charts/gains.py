"""Gain per user, sorted: a mark for each user with its own interval, and the band of the mean's interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedkeep.metrics.worth import Interval
from fedkeep.report.blocks import Drawing, Legend
from fedkeep.report.charts import PANEL
from fedkeep.report.charts.maps import evenly
from fedkeep.report.svg import Canvas, Scale

MOST = 300  # users drawn, taken evenly
HEIGHT, TOP, BOTTOM = 320.0, 34.0, 40.0
LOOKS = {"better": ("2", "triangle"), "worse": ("1", "down"), "": ("x", "circle")}
LEGEND = (
    Legend("better off", *LOOKS["better"]),
    Legend("worse off", *LOOKS["worse"]),
    Legend("can't be told", *LOOKS[""]),
    Legend("mean gain; the band is its 95 % interval", "0"),
)


@dataclass(frozen=True, slots=True)
class Gainer:
    """A user: its gain, the ends of its own interval, the verdict (a key of `LOOKS`), and a hover text."""

    gain: float
    low: float
    high: float
    verdict: str
    tip: str


def gains_chart(
    title: str,
    heading: str,
    users: Sequence[Gainer],
    mean: Interval | None,
    write: Callable[[float], str],
    y_label: str,
) -> Drawing:
    """Draw users from the least gain to the greatest; intervals that reach beyond the axes are cut there."""
    ranked = list(enumerate(sorted(users, key=lambda u: u.gain), start=1))
    shown = evenly(ranked, MOST)
    canvas = Canvas(PANEL, HEIGHT, title)
    ends = [0.0, *(u.gain for u in users), *((mean.low, mean.high) if mean else ())]
    pad = 0.12 * (max(ends) - min(ends)) or 1.0
    y = Scale(min(ends) - pad, max(ends) + pad, HEIGHT - BOTTOM, TOP)
    ticks = y.ticks(5)
    left = 14 + 7.2 * max((len(write(t)) for t in ticks), default=3)
    x = Scale(1, max(len(users), 2), left + 8, PANEL - 16)
    canvas.text(2, 16, y_label, "name")
    for t in ticks:
        canvas.add("line", cls="grid", x1=left, x2=PANEL - 8, y1=y(t), y2=y(t))
        canvas.text(left - 8, y(t) + 4, write(t), anchor="end")
    if mean is not None:
        canvas.add(
            "rect",
            tip=f"mean {write(mean.mean)} ({write(mean.low)} to {write(mean.high)})",
            cls="tip band s0",
            x=left,
            y=y(mean.high),
            width=PANEL - 8 - left,
            height=max(y(mean.low) - y(mean.high), 1.0),
        )
        canvas.add("line", cls="line s0", x1=left, x2=PANEL - 8, y1=y(mean.mean), y2=y(mean.mean))
    canvas.add("line", cls="axis", x1=left, x2=PANEL - 8, y1=y(0.0), y2=y(0.0))
    for rank, user in shown:
        slot, shape = LOOKS[user.verdict]
        place = x(rank)
        if user.low < user.high:
            low, high = max(user.low, y.low), min(user.high, y.high)
            canvas.add("line", cls=f"whisker s{slot}", x1=place, x2=place, y1=y(low), y2=y(high))
        canvas.mark(
            place, y(user.gain), 4.0 if len(shown) <= 60 else 3.0, shape, f"tip fill s{slot}", user.tip
        )
    for rank in sorted({1, len(users)}):
        canvas.under(x(rank), HEIGHT - BOTTOM + 16, f"{rank:,}")
    canvas.text(
        (left + PANEL) / 2, HEIGHT - 4, "users, from the least gain to the greatest", "name", "middle"
    )
    return Drawing(canvas.svg(), "panel", heading)
