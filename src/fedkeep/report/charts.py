"""What charts show: values, names and looks. `fedkeep.report.drawing` draws them.

Colours follow Okabe and Ito (colour-blind safe); lines also differ by dashes and marks by shape. A look is named by its
slot: ``0`` to ``23``, the same eight colours with three kinds of dashes and seven of marks, or ``x`` for grey.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fedkeep.report import wording

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#c98500", "#3f9fd8", "#4d4d4d", "#8a7d00")
GREY, INK, SOFT, HAIR, PAPER = "#a9afb4", "#1d2328", "#5c666f", "#e2e0da", "#ffffff"
RAMP = (
    "#00224e",
    "#1b3a70",
    "#3f4f78",
    "#5c6475",
    "#787877",
    "#958e72",
    "#b3a369",
    "#cfb855",
    "#e8ce2e",
)
"""From little to much, as light as they are much: told apart without colour too."""
DASHES = ("-", (0, (4, 2)), (0, (1, 2)))
"""Of lines, by look: the first eight are whole. In widths of the line."""
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Marks, as matplotlib names them."""
SLOTS = len(COLOURS)
LOOKS = SLOTS * len(DASHES)
MOST_PLACES = 200  # on one curve; a longer one is shown by means of equal parts
MOST_POINTS = 3000  # users drawn on one map, taken evenly
MOST_GAINS = 300  # users drawn, taken evenly


def colour_of(slot: str) -> str:
    """Return the colour of a look."""
    return GREY if slot == "x" else COLOURS[int(slot) % SLOTS]


def mark_of(slot: str) -> str:
    """Return the shape of a look's marks: of looks with the same colour no two have the same."""
    return SHAPES[1:][int(slot) % len(SHAPES[1:])]


def point_of(slot: str) -> str:
    """Return the shape of a look's marks where each point has one: no two of the first eight have the same."""
    return SHAPES[int(slot) % SLOTS]


@dataclass(frozen=True, slots=True)
class Legend:
    """A line of a legend: text, slot, shape (``line``, ``hollow`` or one of `SHAPES`), dashes, a line's mark."""

    label: str
    slot: str
    shape: str = "line"
    dashed: bool = False
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve: places, values, and where known a band from ``low`` to ``high``."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    slot: str
    dashed: bool = False
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Curves over a common axis. More than there are colours are named at their ends, where there is room.

    Attributes:
        series: the curves.
        x_label, y_label: with units.
        heading: above the chart.
        metric: says how y is written, and that a fraction stays within 0 and 1.
        y_format: how y is written, if not by its metric.
        hover_x: the word before x in hover texts.
        x_names: names of the places 0, 1, 2 .. where x is a list of cases and not a quantity.
        log: both axes by logarithm.
        marks: draw each point, by curve in another shape.
        references: values to compare with, and their names.
    """

    series: tuple[Curve, ...]
    x_label: str
    y_label: str
    heading: str = ""
    metric: str = ""
    y_format: Callable[[float], str] | None = None
    hover_x: str = ""
    x_names: tuple[str, ...] = ()
    log: bool = False
    marks: bool = False
    references: tuple[tuple[float, str], ...] = ()

    @property
    def many(self) -> bool:
        """Whether there are more curves than colours."""
        return len(self.series) > SLOTS

    def x_text(self, value: float) -> str:
        """Write a place of x."""
        return self.x_names[int(value)] if self.x_names else wording.plain(round(value, 4))

    def y_text(self, value: float) -> str:
        """Write a value of y."""
        return self.y_format(value) if self.y_format else wording.number(value, self.metric)

    def hover(self) -> list[tuple[float, str]]:
        """Return places of x, and what is said at each: every curve's value near it, the highest first."""
        xs = evenly(sorted({x for s in self.series for x in s.x}), MOST_PLACES)
        near = (xs[-1] - xs[0]) / 60
        out = []
        for value in xs:
            here = []
            for s in self.series:
                i = min(range(len(s.x)), key=lambda i: abs(s.x[i] - value))
                if abs(s.x[i] - value) <= near:
                    span = f" ({self.y_text(s.low[i])} to {self.y_text(s.high[i])})" if s.low else ""
                    here.append((s.y[i], f"{s.label} {self.y_text(s.y[i])}{span}".strip()))
            lines = [text for _, text in sorted(here, key=lambda one: -one[0])]
            out.append((value, "\n".join([f"{self.hover_x or self.x_label} {self.x_text(value)}", *lines])))
        return out


@dataclass(frozen=True, slots=True)
class Strip:
    """One histogram: its name, slot, and one value a user."""

    label: str
    slot: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Histograms one below another above a common axis; heights are shares of users."""

    strips: tuple[Strip, ...]
    metric: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A method's pair of bars: ours (with its deviation where known) and the published value."""

    label: str
    ours: float | None
    std: float | None
    published: float | None


@dataclass(frozen=True, slots=True)
class Bars:
    """Ours beside the published (as FURL Fig. 2), from 0 on; ours alone where nothing is published."""

    bars: tuple[Bar, ...]
    metric: str
    heading: str = ""

    @property
    def paired(self) -> bool:
        """Whether any published value is known."""
        return any(bar.published is not None for bar in self.bars)


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


@dataclass(frozen=True, slots=True)
class Ranks:
    """Models below one another, each with a mean and its 95 % interval; ``zero`` says what the line at 0 is."""

    ranks: tuple[Rank, ...]
    x_label: str
    write: Callable[[float], str]
    zero: str


@dataclass(frozen=True, slots=True)
class Gainer:
    """A user: its gain, the ends of its own interval, the verdict (a key of `VERDICTS`), and a hover text."""

    gain: float
    low: float
    high: float
    verdict: str
    tip: str


@dataclass(frozen=True, slots=True)
class Gains:
    """Gain of each user from the least to the greatest, and the mean with its interval (mean, low, high)."""

    heading: str
    users: tuple[Gainer, ...]
    mean: tuple[float, float, float] | None
    write: Callable[[float], str]
    y_label: str


VERDICTS = {"better": ("2", "^"), "worse": ("1", "v"), "": ("x", "o")}
GAINS_LEGEND = (
    Legend("better off", *VERDICTS["better"]),
    Legend("worse off", *VERDICTS["worse"]),
    Legend("can't be told", *VERDICTS[""]),
    Legend("mean gain; the band is its 95 % interval", "0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Numbers by row and column, shaded, and written where there is room.

    Attributes:
        values: from 0 on, or of both signs; None is not known.
        rows, columns: their names.
        heading: above the chart.
        x_label, y_label: what columns and rows are.
        write: how a number is written in its cell.
        tell: how it is said in a hover text.
        signed: shade by sign and size, in two colours.
    """

    values: tuple[tuple[float | None, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    heading: str = ""
    x_label: str = ""
    y_label: str = ""
    write: Callable[[float], str] = wording.plain
    tell: Callable[[float], str] = wording.plain
    signed: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """A user on a map: place, colour and shape, hover text, and a number that it has on every map of the figure."""

    x: float
    y: float
    colour: str
    shape: str
    tip: str
    user: int


@dataclass(frozen=True, slots=True)
class UserMapChart:
    """A map of user vectors: both axes in the same scale."""

    heading: str
    points: tuple[Point, ...]
    note: str


Chart = Lines | Spread | Bars | Ranks | Gains | Grid | UserMapChart


@dataclass(frozen=True, slots=True)
class Palette:
    """How a trait is shown: categories by colour and shape, or numbers from ``low`` to ``high`` by a ramp."""

    name: str
    places: Mapping[Any, int]
    low: float = 0.0
    high: float = 0.0
    continuous: bool = False

    def look(self, trait: Any) -> tuple[str, str]:
        """Return the colour and the shape of a trait's mark; grey where it has no own."""
        if self.continuous and trait is not None:
            share = (trait - self.low) / (self.high - self.low) if self.high > self.low else 0.5
            return RAMP[min(int(share * len(RAMP)), len(RAMP) - 1)], "o"
        i = None if self.continuous else self.places.get(trait)
        return (GREY, "o") if i is None else (COLOURS[i], SHAPES[i])

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
        return (*own, *([Legend("other", "x", "o")] if others else []))

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


def user_maps(analysis: Mapping[str, Any], palette: Palette) -> list[UserMapChart]:
    """Return a map for each panel. A user has the same number in all panels, so that the page can show it in each."""
    panels = analysis["panels"]
    clients = dict.fromkeys(p["client"] for panel in panels for p in panel["points"])
    users = {client: i for i, client in enumerate(clients)}
    metric = analysis.get("value_name") or "accuracy"
    maps = []
    for panel in panels:
        points = evenly(panel["points"], MOST_POINTS)
        words = [
            f"{wording.metric_inline(k)} {wording.number(v, k)}"
            for k, v in (panel.get("numbers") or {}).items()
        ]
        total = len(panel["points"])
        drawn = f"{len(points):,} of {total:,} users drawn"
        words.append(wording.count(total, "user") if len(points) == total else drawn)
        placed = [
            Point(
                p["x"],
                p["y"],
                *palette.look(p.get("trait")),
                _said_of(p, palette, metric),
                users[p["client"]],
            )
            for p in points
        ]
        maps.append(UserMapChart(wording.printable(panel["name"]), tuple(placed), " · ".join(words)))
    return maps


def _said_of(point: Mapping[str, Any], palette: Palette, metric: str) -> str:
    lines = [wording.printable(point["client"]), f"{palette.name}: {palette.text(point.get('trait'))}"]
    if point.get("value") is not None:
        lines.append(f"{wording.metric_inline(metric)}: {wording.number(point['value'], metric)}")
    if point.get("n") is not None:
        lines.append(wording.count(point["n"], "example"))
    return "\n".join(lines)


def thinned(series: Curve) -> Curve:
    """Return a curve of at most `MOST_PLACES` places: of a longer one the means of equal parts."""
    n = len(series.x)
    if n <= MOST_PLACES:
        return series
    cuts = [i * n // MOST_PLACES for i in range(MOST_PLACES + 1)]

    def means(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)) if values else ()

    return replace(
        series, x=means(series.x), y=means(series.y), low=means(series.low), high=means(series.high)
    )


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, taken evenly."""
    return list(items) if len(items) <= most else [items[i * len(items) // most] for i in range(most)]


def bin_edges(values: Sequence[float], fraction: bool, about: int = 20) -> list[float]:
    """Return bin edges: steps of 5 points for fractions, else round steps from the least value to the greatest."""
    if fraction:
        return [i / 20 for i in range(21)]
    low, high = min(values), max(values)
    if not high > low:
        return [low - 0.5, low + 0.5]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def in_bins(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Return how many values lie in each bin of equal width; an edge belongs to the upper bin, the last to the last."""
    counts = [0] * (len(edges) - 1)
    step = (edges[-1] - edges[0]) / len(counts)
    for value in values:
        counts[min(max(int((value - edges[0]) / step + 1e-9), 0), len(counts) - 1)] += 1
    return counts


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
