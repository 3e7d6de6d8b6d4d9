"""Draws figures with matplotlib: inline SVG for the page, and SVG, PDF and PNG files for papers, of the same drawing.

A module that imports this one loads matplotlib; who builds a report's content doesn't. matplotlib's global state stays
as it is, and the same figure gives the same bytes.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap, to_hex, to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullLocator

from fedkeep.core.files import write_whole
from fedkeep.report import wording
from fedkeep.report.blocks import Figure
from fedkeep.report.charts import (
    COLOURS,
    DASHES,
    GREY,
    HAIR,
    INK,
    MOST_GAINS,
    PAPER,
    RAMP,
    SLOTS,
    SOFT,
    VERDICTS,
    Bars,
    Chart,
    Curve,
    Gains,
    Grid,
    Legend,
    Lines,
    Ranks,
    Spread,
    UserMapChart,
    apart,
    bin_edges,
    colour_of,
    evenly,
    in_bins,
    mark_of,
    point_of,
    thinned,
)

WIDE, NARROW, PANEL = 900.0, 350.0, 440.0
"""Widths in points of a drawing on paper or a screen, on a phone, and of a chart beside another."""
DPI = 144
EVEN = {"s": 0.9, "^": 1.2, "v": 1.2, "D": 0.9, "*": 1.35}  # marks of about the same area
ON_DARK, ON_LIGHT = "#fdfdfd", "#101418"  # of text on a shade, on the page too, whether it is light or dark
LETTER = 7.0  # about the width of one at the size of a legend
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": SOFT,
    "axes.grid": True,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 12,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "font.size": 12,
    "grid.color": HAIR,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "text.color": SOFT,
    "text.parse_math": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "ytick.left": False,
}
VARIABLES = {
    **{colour: f"--c{i}" for i, colour in enumerate(COLOURS)},
    **{colour: f"--q{i}" for i, colour in enumerate(RAMP)},
    GREY: "--cx",
    INK: "--ink",
    SOFT: "--soft",
    HAIR: "--hair",
    PAPER: "--card",
}
"""Of the page's style sheet: what stands for a colour in light and in dark."""


class Drawing:
    """A figure drawn at one width. Hover texts and what a figure is called are added as SVG for the page."""

    def __init__(self, figure: Figure, width: float = WIDE) -> None:
        self.title = figure.title
        self.salt = f"{figure.title} {width:g}"  # makes the ids of the page's drawings differ
        with _styled(self.salt):
            self._draw(figure, width)

    def _draw(self, figure: Figure, width: float) -> None:
        panels, keys = figure.panels, _shown(figure.legend, figure.panels, width)
        columns = min(len(panels), figure.columns) if width > 500 else 1
        width = min(width, columns * PANEL) if figure.columns > 1 else width
        self.roomy = width / columns > 500
        self.width = width / columns
        self.tips: dict[str, list[tuple[str, int | None]]] = {}
        each = [self._height(chart) for chart in panels]
        rows = [max(each[i : i + columns]) for i in range(0, len(panels), columns)]
        beside = _columns(keys, width)
        labels = [_label(e.label, width - 80) for e in keys]
        lines = sum(label.count("\n") + 1 for label in labels)
        above = 20.0 * math.ceil(lines / beside) + 14 if keys else 46.0 if figure.ramp else 0.0
        size = (width / 72, (sum(rows) + above) / 72)
        self.canvas = Canvas(figsize=size, dpi=DPI, layout="constrained", facecolor=PAPER)
        grid = self.canvas.add_gridspec(len(rows), columns, height_ratios=rows)
        axes = [self.canvas.add_subplot(grid[i // columns, i % columns]) for i in range(len(panels))]
        for one, chart in zip(axes, panels, strict=True):
            DRAWN[type(chart)](self, one, chart)
        if figure.same_scale:
            ends = [one.get_ylim() for one in axes]
            for one in axes:
                one.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
        if keys:
            handles = [_handle(e) for e in keys]
            self.canvas.legend(handles, labels, loc="outside upper left", ncols=beside, borderaxespad=0.2)
        if figure.ramp:
            self._ramp(axes, *figure.ramp)
        if layout := self.canvas.get_layout_engine():
            layout.execute(self.canvas)
        self.canvas.set_layout_engine("none")  # places are found once, for all kinds of files

    def _height(self, chart: Chart) -> float:
        match chart:
            case Lines():
                return (340.0 if self.roomy else 300.0) + (24 if chart.heading else 0)
            case Spread():
                return 102.0 * len(chart.strips) + 60
            case Bars():
                each = 66.0 if chart.paired else 42.0
                return each * len(chart.bars) + 32 + (24 if chart.heading else 0)
            case Ranks():
                return (30.0 if self.roomy else 46.0) * len(chart.ranks) + 74
            case Gains():
                return 350.0
            case UserMapChart():
                return self.width + 40
            case Grid():
                rows, around = len(chart.rows), 24 * bool(chart.heading) + 24 * bool(chart.x_label)
                return min(max(420 / rows, 3.0), 26.0) * rows + 90 + around

    def _ramp(self, axes: Sequence[Axes], name: str, low: str, high: str) -> None:
        shades = ScalarMappable(cmap=ListedColormap(RAMP))
        shades.set_clim(0, 1)
        bar = self.canvas.colorbar(
            shades, ax=list(axes), location="top", shrink=0.3, aspect=16, anchor=(0.0, 0.5)
        )
        bar.set_ticks([0, 1], labels=[low, high])
        bar.ax.tick_params(length=0)
        bar.ax.set_title(name, fontsize=12)
        bar.outline.set_visible(False)

    def tell(self, artist: Any, texts: Sequence[str], users: Sequence[int] | None = None) -> None:
        """Give each of an artist's shapes a hover text, and the number of its user."""
        name = f"tip-{len(self.tips)}"
        artist.set_gid(name)
        owners: Sequence[int | None] = users or [None] * len(texts)
        self.tips[name] = list(zip(texts, owners, strict=True))

    def marks(
        self,
        axes: Axes,
        places: Sequence[tuple[float, float]],
        looks: Sequence[tuple[str, str]],
        size: float,
        tips: Sequence[str],
        users: Sequence[int] | None = None,
    ) -> None:
        """Draw marks of a width in points; a look is a colour and a shape, which may be ``hollow``."""
        for shape in dict.fromkeys(shape for _, shape in looks):
            own = [i for i, (_, other) in enumerate(looks) if other == shape]
            colours, hollow = [looks[i][0] for i in own], shape == "hollow"
            drawn = axes.scatter(
                [places[i][0] for i in own],
                [places[i][1] for i in own],
                s=(size * EVEN.get(shape, 1.0)) ** 2,
                marker="o" if hollow else shape,
                facecolors=[PAPER] * len(own) if hollow else colours,
                edgecolors=colours if hollow else [PAPER] * len(own),
                linewidths=1.6 if hollow else 0.7,
                zorder=4,
                clip_on=False,
            )
            self.tell(drawn, [tips[i] for i in own], [users[i] for i in own] if users else None)

    def boxes(
        self,
        axes: Axes,
        places: Sequence[tuple[float, float, float, float]],
        faces: Sequence[str],
        tips: Sequence[str],
        edges: Sequence[str] | None = None,
    ) -> None:
        """Draw boxes (left, lower end, width, height) that are filled, or have an edge."""
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in places]
        width = 0.0 if edges is None else 1.2
        drawn = PolyCollection(
            corners, facecolors=list(faces), edgecolors=list(edges or faces), linewidths=width
        )
        axes.add_collection(drawn)
        self.tell(drawn, tips)

    def file(self, kind: str) -> bytes:
        """Return the drawing as the content of an ``svg``, ``pdf`` or ``png`` file."""
        about = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}[kind]
        out = io.BytesIO()
        with _styled(self.salt):
            self.canvas.savefig(out, format=kind, metadata=cast("dict[str, Any]", about))
        return out.getvalue()

    def inline(self) -> str:
        """Return the drawing as an SVG element of the page: its colours, its fonts, hover texts."""
        text = self.file("svg").decode()
        for colour, variable in VARIABLES.items():
            text = text.replace(colour, f"var({variable})")
        text = text.replace(' xmlns="http://www.w3.org/2000/svg"', "").replace("xlink:href", "href")
        root = ElementTree.fromstring(text)  # noqa: S314  (our own output)
        _, _, width, height = root.attrib["viewBox"].split()
        root.attrib.clear()
        root.attrib.update(viewBox=f"0 0 {width} {height}", role="img", style=f"max-width:{float(width):g}px")
        root.set("aria-label", self.title)
        root[:] = [part for part in root if part.tag == "g" or part.find("clipPath") is not None]
        for group in root.iter("g"):
            self._hover(group, self.tips.get(group.attrib.pop("id", ""), []))
        return ElementTree.tostring(root, encoding="unicode")

    def _hover(self, group: ElementTree.Element, tips: list[tuple[str, int | None]]) -> None:
        shapes = [e for e in _shapes(group) if e.tag in ("path", "use")] if tips else []
        for shape, (text, user) in zip(shapes, tips, strict=bool(tips)):
            for place in {"x", "y"} & shape.attrib.keys():
                shape.set(place, f"{float(shape.attrib[place]):.1f}")
            shape.tail = ""
            if text:
                shape.set("class", "tip")
                ElementTree.SubElement(shape, "title").text = text
            if user is not None:
                shape.set("data-u", str(user))


def to_svg(figure: Figure) -> str:
    """Return a figure as the page shows it: a wide drawing and a narrow one, of which it shows what fits."""
    forms = (("wide", WIDE), ("narrow", NARROW))
    return "\n".join(f'<div class="{form}">{Drawing(figure, width).inline()}</div>' for form, width in forms)


def write_figure(
    figure: Figure, folder: Path, name: str, kinds: Sequence[str] = ("svg", "pdf", "png")
) -> list[Path]:
    """Write a figure as ``NAME.svg``, ``NAME.pdf`` and ``NAME.png``, or of these ``kinds`` alone; return the files.

    Raises:
        RunError: a file can't be written; an older one is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths, drawn = [], Drawing(figure)
    for kind in kinds:
        paths.append(folder / f"{name}.{kind}")
        write_whole(paths[-1], drawn.file(kind))
    return paths


@contextmanager
def _styled(salt: str) -> Iterator[None]:
    """Return a context in which figures look like fedkeep's, whatever a user's own settings of matplotlib are."""
    with matplotlib.style.context(["default", {**STYLE, "svg.hashsalt": salt}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the PNG's font lacks
        warnings.filterwarnings(
            "ignore", message="constrained_layout not applied"
        )  # names that take all room
        yield


def _shapes(group: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Yield what a group draws, in order, without what is only defined in it."""
    for element in group:
        if element.tag != "defs":
            yield element
            yield from _shapes(element)


class _PlainTicks(Formatter):
    """Writes all ticks of an axis alike."""

    def __init__(self, write: Callable[[Sequence[float]], Callable[[float], str]]) -> None:
        self.write = write

    def format_ticks(self, values: Any) -> list[str]:
        ticks = [float(v) for v in values]
        low, high = sorted(self.axis.get_view_interval())  # type: ignore[union-attr]
        slack = 1e-9 * (high - low)
        write = self.write([t for t in ticks if low - slack <= t <= high + slack])
        return [write(0.0 if abs(t) < slack else t) for t in ticks]

    def __call__(self, x: float, pos: int | None = None) -> str:
        return self.write([x])(x)


def _wrapped(text: str, width: float) -> str:
    """Return a text in at most three lines that fit a width in points."""
    return textwrap.fill(text, max(int(width / LETTER), 8), max_lines=3, placeholder="…")


def _label(text: str, width: float) -> str:
    """Return a legend's text; matplotlib hides one that begins with an underscore."""
    return ("\u200b" if text.startswith("_") else "") + _wrapped(text, width)


def _columns(keys: Sequence[Legend], width: float) -> int:
    """Return how many of a legend's entries stand side by side: as many as fit."""
    for columns in range(len(keys), 1, -1):
        rows, more = divmod(len(keys), columns)
        starts = [0]
        for i in range(columns):
            starts.append(starts[-1] + rows + (i < more))
        widest = [max(len(e.label) for e in keys[a:b]) for a, b in pairwise(starts)]
        if sum(LETTER * n + 60 for n in widest) <= width:
            return columns
    return 1


def _shown(legend: Sequence[Legend], panels: Sequence[Chart], width: float) -> Sequence[Legend]:
    """Return a legend's entries that the drawing does not name itself."""
    named = width > 500 and len(panels) == 1 and isinstance(panels[0], Lines) and panels[0].many
    return () if named else legend


def _handle(entry: Legend) -> Line2D | Patch:
    colour = colour_of(entry.slot)
    if entry.shape == "hollow":
        return Patch(facecolor=PAPER, edgecolor=colour, linewidth=1.4)
    if entry.shape == "line":
        return Line2D([], [], color=colour, linestyle=_dashes(entry.slot, entry.dashed), marker=entry.mark)
    return Line2D([], [], color=colour, marker=entry.shape, markersize=8, linestyle="none")


def _dashes(slot: str, dashed: bool) -> Any:
    return (0, (3, 2)) if dashed else "-" if slot == "x" else DASHES[int(slot) // SLOTS]


def _lines(drawing: Drawing, axes: Axes, chart: Lines) -> None:
    series = [thinned(s) for s in chart.series if s.x]
    axes.grid(visible=False, axis="x")
    axes.set_title(_wrapped(chart.heading, 0.8 * drawing.width), pad=30 if chart.heading else 6)
    axes.annotate(chart.y_label, (0, 1), (0, 12), xycoords="axes fraction", textcoords="offset points")
    axes.set_xlabel(_wrapped(chart.x_label, drawing.width - 80))
    if chart.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    low, high = _y_range(series, chart)
    axes.set_ylim(low, high)
    x_low, x_high = min(s.x[0] for s in series), max(s.x[-1] for s in series)
    for s in series:
        _curve(drawing, axes, chart, s)
    if chart.x_names:
        axes.set_xlim(-0.5, len(chart.x_names) - 0.5)
        room = (drawing.width - 60) / (8 + LETTER * max(map(len, chart.x_names)))
        step = math.ceil(len(chart.x_names) / room)
        ticks = sorted(range(len(chart.x_names) - 1, -1, -step))
        axes.set_xticks(ticks, [chart.x_names[i] for i in ticks])
    elif chart.log:
        axes.set_xlim(x_low / 1.2, x_high * 1.2)
    else:
        pad = 0.012 * (x_high - x_low) or 0.5
        axes.set_xlim(x_low - pad, x_high + pad)
        axes.xaxis.set_major_locator(MaxNLocator(9 if drawing.roomy else 4, steps=[1, 2, 5, 10]))
    if not chart.x_names:
        axes.xaxis.set_major_formatter(_PlainTicks(lambda _: chart.x_text))
    axes.yaxis.set_major_formatter(
        _PlainTicks(
            lambda ticks: (
                _without_zeros(chart.y_format, ticks)
                if chart.y_format
                else wording.on_axis(ticks, chart.metric)
            )
        )
    )
    if chart.log:
        for axis, ends in ((axes.xaxis, (x_low, x_high)), (axes.yaxis, (low, high))):
            fine = (1.0, 2.0, 5.0) if ends[1] / ends[0] < 1000 else (1.0,)
            axis.set_major_locator(LogLocator(subs=fine, numticks=9))
            axis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    for value, name in chart.references:
        if low <= value <= high:
            below = any(0 < other - value < 0.07 * (high - low) for other, _ in chart.references)
            axes.axhline(value, color=INK, linestyle=(0, (1.5, 3)), linewidth=1.1)
            axes.annotate(
                name,
                (1, value),
                (-2, -5 if below else 5),
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                ha="right",
                va="top" if below else "baseline",
                bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            )
    if chart.many and drawing.roomy:
        _name_ends(axes, series)
    _hover_bands(drawing, axes, chart)


def _curve(drawing: Drawing, axes: Axes, chart: Lines, s: Curve) -> None:
    colour, n = colour_of(s.slot), len(s.x)
    if s.low and not chart.many:  # bands of so many curves would hide them
        if chart.x_names or n == 1:
            axes.vlines(s.x, s.low, s.high, color=colour, linewidth=1.6, alpha=0.55)
        else:
            axes.fill_between(s.x, s.low, s.high, color=colour, alpha=0.16, linewidth=0)
    mark, every = point_of(s.slot) if chart.marks and not s.dashed else "o" if n == 1 else "", None
    if chart.many and not mark:
        mark = (point_of if chart.marks else mark_of)(s.slot)
        every = sorted({round(share * (n - 1)) for share in (0, 0.25, 0.5, 0.75, 1)})
    axes.plot(
        s.x,
        s.y,
        color=colour,
        linestyle=_dashes(s.slot, s.dashed),
        marker=mark or "none",
        markersize=6.5,
        markevery=every,
        clip_on=not mark,
    )


def _name_ends(axes: Axes, series: Sequence[Curve]) -> None:
    """Write each curve's name beside its last point; names keep a distance, and a line leads to each."""
    tall = 250.0  # points, about
    low, high = axes.get_ylim()
    ends = sorted(((s.y[-1] - low) / (high - low) * tall, i) for i, s in enumerate(series))
    for (_, i), place in zip(ends, apart([end for end, _ in ends], 15.0, -30.0, tall), strict=True):
        s, colour = series[i], colour_of(series[i].slot)
        axes.annotate(
            "",
            (s.x[-1], s.y[-1]),
            (1.035, place / tall),
            textcoords="axes fraction",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.6, "shrinkA": 3, "shrinkB": 5},
        )
        axes.plot(
            1.04, place / tall, color=colour, marker=mark_of(s.slot), transform=axes.transAxes, clip_on=False
        )
        name = s.label if len(s.label) <= 30 else f"{s.label[:29]}…"
        axes.annotate(name, (1.05, place / tall), (4, 0), "axes fraction", "offset points", va="center")


def _hover_bands(drawing: Drawing, axes: Axes, chart: Lines) -> None:
    """Add a band around each place of x, which the page shows under a pointer, with the values there."""
    said = chart.hover()
    xs = [x for x, _ in said]
    ends = [axes.get_xlim()[0], *((a + b) / 2 for a, b in pairwise(xs)), axes.get_xlim()[1]]
    spans = [(a, b - a) for a, b in pairwise(ends)]
    across = axes.get_xaxis_transform()
    bands = axes.broken_barh(spans, (0, 1), facecolors="none", edgecolors="none", zorder=5, transform=across)
    drawing.tell(bands, [text for _, text in said])


def _y_range(series: Sequence[Curve], chart: Lines) -> tuple[float, float]:
    values = [v for s in series for v in (*s.y, *s.low, *s.high)] + [value for value, _ in chart.references]
    if chart.log:
        return min(v for v in values if v > 0) / 1.3, max(values) * 1.3
    low, high = min(values), max(values)
    if 0 < low < 0.6 * high:
        low = 0.0
    pad = (high - low or abs(high) or 1.0) * 0.06
    low, high = low - pad if low else low, high + pad
    return (max(low, 0.0), min(high, 1.0)) if wording.is_fraction(chart.metric) else (low, high)


def _spread(drawing: Drawing, axes: Axes, chart: Spread) -> None:
    """Strip i stands on i + 1; its boxes are at most 0.62 high."""
    strips, metric = chart.strips, chart.metric
    edges = bin_edges([v for s in strips for v in s.values], wording.is_fraction(metric))
    counts = [in_bins(s.values, edges) for s in strips]
    highest = max(n / len(s.values) for s, row in zip(strips, counts, strict=True) for n in row)
    tick = max(t for t in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(0, highest) if t <= highest)
    scale, gap = 0.62 / highest, 0.05 * (edges[1] - edges[0])
    for i, (strip, row) in enumerate(zip(strips, counts, strict=True)):
        base, colour = i + 1.0, colour_of(strip.slot)
        shares = [(j, n, n / len(strip.values)) for j, n in enumerate(row) if n]
        axes.axhline(base, color=SOFT, linewidth=0.8, alpha=0.6)
        axes.annotate(
            strip.label,
            (0, base - 0.72),
            xycoords=axes.get_yaxis_transform(),
            weight="bold",
            color=INK,
            va="bottom",
        )
        drawing.boxes(
            axes,
            [
                (edges[j] + gap, base - scale * share, edges[j + 1] - edges[j] - 2 * gap, scale * share)
                for j, _, share in shares
            ],
            [colour] * len(shares),
            [
                f"{strip.label}\n{wording.number(edges[j], metric, digits=0)} to "
                f"{wording.number(edges[j + 1], metric, digits=0)}\n{wording.count(n, 'user')} ({100 * share:.1f} %)"
                for j, n, share in shares
            ],
        )
        mean = sum(strip.values) / len(strip.values)
        tip = f"{strip.label}\nmean {wording.number(mean, metric)}"
        drawing.marks(axes, [(mean, base + 0.06)], [(INK, "^")], 8, [tip])
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(len(strips) + 0.12, -0.1)
    axes.grid(visible=False, axis="x")
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks([i + 1 - scale * tick for i in range(len(strips))], [f"{100 * tick:.3g} %"] * len(strips))
    axes.xaxis.set_major_locator(MaxNLocator(10 if drawing.roomy else 5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(_PlainTicks(lambda ticks: wording.on_axis(ticks, metric)))
    axes.annotate(
        "Share of users (%)", (0, 1), (-40, 4), xycoords="axes fraction", textcoords="offset points"
    )
    axes.set_xlabel(f"{wording.metric_name(metric)} of a user")


def _bars(drawing: Drawing, axes: Axes, chart: Bars) -> None:
    """Pair i stands below i, where its name is."""
    places, faces, edges, tips = [], [], [], []
    tall = 1.0 if chart.paired else 0.65
    for i, bar in enumerate(chart.bars):
        top = i * tall
        axes.annotate(bar.label, (0, top + 0.22), weight="bold", color=INK, va="bottom")
        ours = wording.spread(bar.ours, bar.std, chart.metric)
        published = wording.number(bar.published, chart.metric)
        pair = (("ours", bar.ours, ours, 0.25), ("published", bar.published, published, 0.58))
        for who, value, text, y in pair if chart.paired else pair[:1]:
            axes.annotate(
                text,
                (value or 0.0, top + y + 0.13),
                (6, 0),
                textcoords="offset points",
                va="center",
                annotation_clip=False,
            )
            if value is not None:
                places.append((0.0, top + y, value, 0.26))
                faces.append(COLOURS[0] if who == "ours" else PAPER)
                edges.append(COLOURS[0])
                tips.append(f"{bar.label}\n{who}: {text}")
    drawing.boxes(axes, places, faces, tips, edges)
    axes.set_xlim(0, max((w for _, _, w, _ in places), default=0.0) or 1.0)
    axes.set_ylim(tall * len(chart.bars), 0)
    axes.set_title(_wrapped(chart.heading, 0.8 * drawing.width))
    axes.grid(visible=False)
    axes.set(xticks=[], yticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(f"{wording.metric_name(chart.metric)}; bars start at 0", loc="left")


def _ranks(drawing: Drawing, axes: Axes, chart: Ranks) -> None:
    beside = drawing.roomy
    for i, r in enumerate(chart.ranks):
        weight, colour = ("bold", INK) if r.filled else ("normal", SOFT)
        shown = r.label if len(r.label) <= 44 else f"{r.label[:43]}…"
        for text, x, side, away in ((shown, 0, "right", -10), (r.text, 1, "left", 10)):
            axes.annotate(
                text,
                (x, i),
                (away, 0) if beside else (0, 10),
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                ha=side if beside else {"left": "right", "right": "left"}[side],
                va="center" if beside else "bottom",
                weight=weight,
                color=colour,
                annotation_clip=False,
            )
        if r.low is not None and r.high is not None:
            axes.hlines(i, r.low, r.high, color=colour_of(r.slot), linewidth=1.6, alpha=0.7)
    drawing.marks(
        axes,
        [(r.mean, i) for i, r in enumerate(chart.ranks)],
        [(colour_of(r.slot), r.shape if r.filled else "hollow") for r in chart.ranks],
        9.5,
        [r.tip for r in chart.ranks],
    )
    ends = [0.0, *(v for r in chart.ranks for v in (r.mean, r.low, r.high) if v is not None)]
    pad = 0.05 * (max(ends) - min(ends)) or 1.0
    axes.set_xlim(min(ends) - pad, max(ends) + pad)
    axes.set_ylim(len(chart.ranks) - 0.5, -0.5 if beside else -0.8)
    axes.axvline(0, color=SOFT, linewidth=1, alpha=0.8)
    axes.annotate(
        chart.zero,
        (0, 1),
        (0, 4),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha="center",
    )
    axes.grid(visible=False, axis="y")
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(8 if beside else 4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(_PlainTicks(lambda ticks: _without_zeros(chart.write, ticks)))
    axes.set_xlabel(_wrapped(chart.x_label, drawing.width - 40))


def _without_zeros(write: Callable[[float], str], ticks: Sequence[float]) -> Callable[[float], str]:
    """Return how ticks are written: whole numbers without a ``.0``."""
    whole = all(write(t).endswith(".0") for t in ticks)
    return (lambda t: write(t).removesuffix(".0")) if whole else write


def _gains(drawing: Drawing, axes: Axes, chart: Gains) -> None:
    """Intervals that reach beyond the axes are cut there."""
    ranked = list(enumerate(sorted(chart.users, key=lambda u: u.gain), start=1))
    shown = evenly(ranked, MOST_GAINS)
    ends = [0.0, *(u.gain for u in chart.users), *(chart.mean or ())]
    pad = 0.12 * (max(ends) - min(ends)) or 1.0
    axes.set_ylim(min(ends) - pad, max(ends) + pad)
    axes.set_xlim(0.5, max(len(chart.users), 2) + 0.5)
    if chart.mean is not None:
        mean, low, high = chart.mean
        axes.axhspan(low, high, color=COLOURS[0], alpha=0.16, linewidth=0)
        line = axes.axhline(mean, color=COLOURS[0])
        drawing.tell(line, [f"mean {chart.write(mean)} ({chart.write(low)} to {chart.write(high)})"])
    axes.axhline(0, color=SOFT, linewidth=1, alpha=0.8)
    spans = [(rank, u) for rank, u in shown if u.low < u.high]
    axes.vlines(
        [rank for rank, _ in spans],
        [u.low for _, u in spans],
        [u.high for _, u in spans],
        colors=[colour_of(VERDICTS[u.verdict][0]) for _, u in spans],
        linewidth=1.6,
        alpha=0.55,
    )
    looks = [VERDICTS[u.verdict] for _, u in shown]
    drawing.marks(
        axes,
        [(float(rank), u.gain) for rank, u in shown],
        [(colour_of(slot), shape) for slot, shape in looks],
        8.5 if len(shown) <= 60 else 6.5,
        [u.tip for _, u in shown],
    )
    axes.grid(visible=False, axis="x")
    axes.set_xticks(sorted({1, len(chart.users)}), [f"{n:,}" for n in sorted({1, len(chart.users)})])
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(_PlainTicks(lambda ticks: _without_zeros(chart.write, ticks)))
    axes.set_title(_wrapped(chart.heading, 0.8 * drawing.width), pad=30)
    axes.annotate(chart.y_label, (0, 1), (0, 12), xycoords="axes fraction", textcoords="offset points")
    axes.set_xlabel(_wrapped("users, from the least gain to the greatest", drawing.width - 80))


def _grid(drawing: Drawing, axes: Axes, chart: Grid) -> None:
    cells = [(i, j, v) for i, row in enumerate(chart.values) for j, v in enumerate(row) if v is not None]
    shades = _shades(chart, max(abs(v) for *_, v in cells) or 1.0)
    drawing.boxes(
        axes,
        [(j, i, 1.0, 1.0) for i, j, _ in cells],
        [shades(v)[0] for *_, v in cells],
        [f"{chart.rows[i]}\n{chart.columns[j]}: {chart.tell(v)}" for i, j, v in cells],
        [PAPER if v else HAIR for *_, v in cells],
    )
    rows, columns = len(chart.rows), len(chart.columns)
    room = (drawing.width - 150) / columns
    if rows <= 26 and LETTER * max(len(chart.write(v)) for *_, v in cells) < room:
        for i, j, v in cells:
            if v or chart.signed:
                text, colour = chart.write(v), shades(v)[1]
                axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=10.5, color=colour)
    axes.set(xlim=(0, columns), ylim=(rows, 0), facecolor=HAIR)
    axes.set_title(_wrapped(chart.heading, 0.8 * drawing.width))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.xaxis.set_label_position("top")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    across = math.ceil(columns * 15 / (drawing.width - 150))
    down = math.ceil(rows * 13 / min(26 * rows, 420))
    names = [textwrap.shorten(name, 20, placeholder="…") for name in chart.columns[::across]]
    axes.set_xticks([j + 0.5 for j in range(0, columns, across)], names)
    axes.xaxis.tick_top()
    turned = LETTER * max(map(len, names)) * len(names) > drawing.width - 150
    for label in axes.get_xticklabels() if turned else ():
        label.set(rotation=40, ha="left", rotation_mode="anchor")
    axes.set_yticks(
        [i + 0.5 for i in range(0, rows, down)],
        [name if len(name) <= 18 else f"{name[:17]}…" for name in chart.rows[::down]],
    )
    axes.tick_params(length=0, labelsize=10.5)


def _shades(chart: Grid, most: float) -> Callable[[float], tuple[str, str]]:
    """Return a function: the colour of a number's box, and that of its text, in light and in dark."""

    def of(value: float) -> tuple[str, str]:
        if not value:
            return PAPER, ON_LIGHT
        share = abs(value) / most
        if chart.signed:
            red, green, blue = to_rgb(COLOURS[0] if value > 0 else COLOURS[1])
            shade = to_hex((1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue)))
            return shade, ON_DARK if share > 0.65 else ON_LIGHT
        step = min(int(len(RAMP) * share), len(RAMP) - 1)
        return RAMP[step], ON_DARK if step < 4 else ON_LIGHT

    return of


def _map(drawing: Drawing, axes: Axes, chart: UserMapChart) -> None:
    n = len(chart.points)
    drawing.marks(
        axes,
        [(p.x, p.y) for p in chart.points],
        [(p.colour, p.shape) for p in chart.points],
        9.5 if n <= 150 else 7.5 if n <= 600 else 5.5,
        [p.tip for p in chart.points],
        [p.user for p in chart.points],
    )
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines[:].set(visible=True, color=HAIR)
    axes.grid(visible=False)
    axes.set(xticks=[], yticks=[], ylabel="map axis 2 (no unit)")
    axes.set_xlabel(f"map axis 1 (no unit)\n{_wrapped(chart.note, drawing.width - 20)}")
    axes.set_title(_wrapped(chart.heading, 0.8 * drawing.width))


DRAWN: dict[type, Callable[[Drawing, Axes, Any], None]] = {
    Lines: _lines,
    Spread: _spread,
    Bars: _bars,
    Ranks: _ranks,
    Gains: _gains,
    Grid: _grid,
    UserMapChart: _map,
}
