"""Maps of user vectors side by side, coloured by a trait; a hover text tells who a point is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedkeep.report import wording
from fedkeep.report.blocks import Drawing, Legend
from fedkeep.report.charts import RAMP, SLOTS
from fedkeep.report.svg import SHAPES, Canvas, Scale

MOST = 3000  # users drawn on one map, taken evenly
SIZE = 430.0
EDGE = 16.0  # room for the axes' names


@dataclass(frozen=True, slots=True)
class Palette:
    """How a trait is shown: categories by colour and shape, or numbers from ``low`` to ``high`` by a ramp."""

    name: str
    places: Mapping[Any, int]
    low: float = 0.0
    high: float = 0.0
    continuous: bool = False

    def look(self, trait: Any) -> tuple[str, str]:
        """Return the CSS class and the shape of a trait's mark; grey where it has no own."""
        if self.continuous and trait is not None:
            share = (trait - self.low) / (self.high - self.low) if self.high > self.low else 0.5
            return f"q{min(int(share * RAMP), RAMP - 1)}", "circle"
        i = None if self.continuous else self.places.get(trait)
        return ("sx", "circle") if i is None else (f"s{i}", SHAPES[i])

    def text(self, trait: Any) -> str:
        """Write a trait."""
        if trait is None:
            return wording.MISSING
        if not self.continuous:
            return wording.printable(trait)
        rate = any(w in self.name.lower() for w in ("rate", "share")) and 0 <= self.low <= self.high <= 1
        return wording.number(trait, "accuracy" if rate else "")

    def legend(self, others: bool) -> tuple[Legend, ...]:
        """Return the legend of the categories, with a line for all others where there are any."""
        own = [Legend(wording.printable(t), str(i), SHAPES[i]) for t, i in self.places.items()]
        return (*own, *([Legend("other", "x", "circle")] if others else []))

    def ramp(self) -> tuple[str, str, str] | None:
        """Return what the ramp of colours means and its ends."""
        return (self.name, self.text(self.low), self.text(self.high)) if self.continuous else None


def palette_of(analysis: Mapping[str, Any]) -> Palette:
    """Return the palette that all panels of a map share; the most frequent categories get colours."""
    name = wording.printable(analysis.get("trait_name") or "trait")
    traits = [
        p["trait"] for panel in analysis["panels"] for p in panel["points"] if p.get("trait") is not None
    ]
    if analysis.get("trait_kind") == "continuous":
        return Palette(name, {}, min(traits, default=0.0), max(traits, default=0.0), continuous=True)
    order = [t for t, _ in sorted(Counter(traits).items(), key=lambda pair: (-pair[1], str(pair[0])))]
    shown = order if len(order) <= SLOTS else order[: SLOTS - 1]
    return Palette(name, {trait: i for i, trait in enumerate(shown)})


def user_maps(analysis: Mapping[str, Any], palette: Palette) -> list[Drawing]:
    """Draw one panel a map. A user has the same number in all panels, so that the page can show it in each."""
    panels = analysis["panels"]
    users = {
        c: i for i, c in enumerate(dict.fromkeys(p["client"] for panel in panels for p in panel["points"]))
    }
    metric = analysis.get("value_name") or "accuracy"
    drawings = []
    for panel in panels:
        points = evenly(panel["points"], MOST)
        name = wording.printable(panel["name"])
        canvas = Canvas(SIZE, SIZE, f"Map of user vectors: {name}")
        _draw(canvas, points, users, palette, metric)
        drawings.append(Drawing(canvas.svg(), "panel", name, _note(panel, len(points))))
    return drawings


def _draw(
    canvas: Canvas,
    points: Sequence[Mapping[str, Any]],
    users: Mapping[str, int],
    palette: Palette,
    metric: str,
) -> None:
    """Draw one panel: both axes in the same scale, the middle of the range in the middle."""
    canvas.add("rect", cls="frame", x=EDGE, y=0.5, width=SIZE - EDGE - 0.5, height=SIZE - EDGE - 0.5)
    canvas.text((EDGE + SIZE) / 2, SIZE - 3, "map axis 1 (no unit)", "small", "middle")
    turn = f"translate(11 {(SIZE - EDGE) / 2:g}) rotate(-90)"
    canvas.add("text", "map axis 2 (no unit)", cls="small", text_anchor="middle", transform=turn)
    if not points:
        return
    xs, ys = [p["x"] for p in points], [p["y"] for p in points]
    half = max(max(xs) - min(xs), max(ys) - min(ys), 1e-9) / 2
    mid_x, mid_y = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
    x = Scale(mid_x - half, mid_x + half, EDGE + 12, SIZE - 12)
    y = Scale(mid_y - half, mid_y + half, SIZE - EDGE - 12, 12)
    radius = 5.0 if len(points) <= 150 else 4.0 if len(points) <= 600 else 3.0
    for p in points:
        colour, shape = palette.look(p.get("trait"))
        tip = _tip(p, palette, metric)
        canvas.mark(x(p["x"]), y(p["y"]), radius, shape, f"tip point {colour}", tip, users[p["client"]])


def _tip(point: Mapping[str, Any], palette: Palette, metric: str) -> str:
    lines = [wording.printable(point["client"]), f"{palette.name}: {palette.text(point.get('trait'))}"]
    if point.get("value") is not None:
        lines.append(f"{wording.metric_inline(metric)}: {wording.number(point['value'], metric)}")
    if point.get("n") is not None:
        lines.append(wording.count(point["n"], "example"))
    return "\n".join(lines)


def _note(panel: Mapping[str, Any], drawn: int) -> str:
    words = [
        f"{wording.metric_inline(k)} {wording.number(v, k)}" for k, v in (panel.get("numbers") or {}).items()
    ]
    total = len(panel["points"])
    words.append(wording.count(total, "user") if drawn == total else f"{drawn:,} of {total:,} users drawn")
    return " · ".join(words)


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, taken evenly."""
    return list(items) if len(items) <= most else [items[i * len(items) // most] for i in range(most)]
