"""Figures of a page as files for papers: SVG that needs no style sheet, and from the same drawing PDF and PNG.

PDF and PNG are drawn by matplotlib (the extra ``figures``), element by element, so a figure is the same everywhere.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fedkeep.core.files import write_whole
from fedkeep.report.blocks import Figure
from fedkeep.report.charts import DASHES
from fedkeep.report.charts.legends import with_legend

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#c98500", "#3f9fd8", "#4d4d4d", "#8a7d00")
GREY, INK, SOFT, GRID = "#a9afb4", "#1d2328", "#5c666f", "#e2e0da"
SLOT = re.compile(r"s(\d+|x)")
STYLES: dict[str, dict[str, str]] = {
    "grid": {"stroke": GRID},
    "axis": {"stroke": SOFT},
    "reference": {"stroke": INK, "stroke-dasharray": "2 4"},
    "line": {"fill": "none", "stroke": "C", "stroke-width": "2.2", "stroke-linejoin": "round"},
    "dashed": {"stroke-dasharray": "7 5"},
    "band": {"fill": "C", "fill-opacity": "0.16"},
    "whisker": {"stroke": "C", "stroke-width": "1.6"},
    "fill": {"fill": "C"},
    "hollow": {"fill": "#ffffff", "stroke": "C", "stroke-width": "1.4"},
    "meanmark": {"fill": INK},
    "tick": {"fill": SOFT, "font-size": "12"},
    "name": {"fill": SOFT, "font-size": "12.5"},
    "small": {"fill": SOFT, "font-size": "10.5"},
    "strong": {"fill": INK, "font-size": "13", "font-weight": "600"},
}
"""What the page's light style sheet says of each class; ``C`` is the colour of the element's look."""
DRAWN = ("line", "rect", "path", "circle", "text")
DPI = 200


def write_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure's widest drawing as ``NAME.svg``, and with matplotlib installed as PDF and PNG; return the files.

    Of several panels each is a file, with its number at the end. Under each stands the legend of what it does not name
    itself. The same figure gives the same bytes.
    """
    drawings = [d for d in figure.drawings if d.form != "narrow"]
    out = []
    for i, drawing in enumerate(drawings, 1):
        stem = name if len(drawings) == 1 else f"{name}-{i}"
        root = with_legend(ElementTree.fromstring(drawing.svg), figure.legend)  # noqa: S314  (our own output)
        path = folder / f"{stem}.svg"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, standalone(root).encode())
        out.append(path)
        if has_matplotlib():
            out += _with_matplotlib(root, folder / stem)
    return out


def has_matplotlib() -> bool:
    """Tell whether PDF and PNG can be written."""
    return importlib.util.find_spec("matplotlib") is not None


def standalone(root: ElementTree.Element) -> str:
    """Return a drawing as an SVG file: colours stand at the elements; what only shows under a pointer is left out."""
    width, height = _size(root)
    namespace = "http://www.w3.org/2000/svg"
    whole = ElementTree.Element(
        "svg",
        {
            "xmlns": namespace,
            "width": f"{width:g}",
            "height": f"{height:g}",
            "viewBox": root.attrib["viewBox"],
            "font-family": "Helvetica, Arial, sans-serif",
        },
    )
    ElementTree.SubElement(whole, "rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
    for tag, attributes, text in elements(root):
        ElementTree.SubElement(whole, tag, attributes).text = text or None
    return ElementTree.tostring(whole, encoding="unicode") + "\n"


def elements(root: ElementTree.Element) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield what is to be drawn, in order: tag, attributes with colours in place of classes, and text."""
    for element in root:
        classes = element.attrib.get("class", "").split()
        if element.tag not in DRAWN or "hit" in classes:
            continue
        slot = next((m.group(1) for c in classes if (m := SLOT.fullmatch(c))), "x")
        colour = GREY if slot == "x" else COLOURS[int(slot) % len(COLOURS)]
        style = dict(STYLES["tick"]) if element.tag == "text" else {}
        if "line" in classes and slot != "x" and (dashes := DASHES[int(slot) // len(COLOURS)]):
            style["stroke-dasharray"] = dashes
        for name in classes:
            style |= {k: colour if v == "C" else v for k, v in STYLES.get(name, {}).items()}
        kept = {k: v for k, v in element.attrib.items() if k not in ("class", "data-u")}
        yield element.tag, kept | style, "".join(element.itertext()) if element.tag == "text" else ""


def _size(root: ElementTree.Element) -> tuple[float, float]:
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    return width, height


def _with_matplotlib(root: ElementTree.Element, stem: Path) -> list[Path]:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Sheet

    width, height = _size(root)
    with mpl.rc_context({"pdf.fonttype": 42, "font.family": "sans-serif"}):
        sheet = Sheet(figsize=(width / 72, height / 72), dpi=DPI)  # a unit of the drawing is a point
        axes = sheet.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        for order, (tag, attributes, text) in enumerate(elements(root)):
            artist = _artist(tag, attributes, text)
            artist.set_zorder(order)
            axes.add_artist(artist)
        out = []
        for kind, about in (("pdf", {"CreationDate": None}), ("png", {"Software": None})):
            path = stem.with_name(f"{stem.name}.{kind}")
            drawn = io.BytesIO()
            sheet.savefig(drawn, format=kind, metadata=about)
            write_whole(path, drawn.getvalue())
            out.append(path)
    return out


def _artist(tag: str, a: Mapping[str, str], text: str) -> Any:
    """Return an element as matplotlib draws it."""
    from matplotlib import lines, patches
    from matplotlib import path as paths
    from matplotlib import text as texts

    def number(name: str) -> float:
        return float(a.get(name, 0))

    if tag == "text":
        sides = {"end": "right", "middle": "center"}
        return texts.Text(
            number("x"),
            number("y"),
            text,
            color=a["fill"],
            fontsize=float(a["font-size"]),
            parse_math=False,
            fontweight="bold" if "font-weight" in a else "normal",
            ha=sides.get(a.get("text-anchor", ""), "left"),
            va="baseline",
            clip_on=False,
        )
    dashes = a.get("stroke-dasharray")
    width = float(a.get("stroke-width", 1))
    style: Any = "-" if dashes is None else (0, tuple(float(d) / width for d in dashes.split()))
    if tag == "line":
        return lines.Line2D(
            [number("x1"), number("x2")],
            [number("y1"), number("y2")],
            color=a.get("stroke", SOFT),
            linewidth=width,
            linestyle=style,
        )
    fill, stroke = a.get("fill", "none"), a.get("stroke", "none")
    look: dict[str, Any] = {
        "facecolor": fill,
        "edgecolor": stroke,
        "linewidth": width if stroke != "none" else 0.0,
    }
    alpha = float(a.get("fill-opacity", 1))
    if tag == "circle":
        return patches.Circle((number("cx"), number("cy")), number("r"), **look)
    if tag == "rect":
        return patches.Rectangle(
            (number("x"), number("y")), number("width"), number("height"), alpha=alpha, **look
        )
    places = [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", a["d"].removesuffix("Z"))[1:]]
    codes = [paths.Path.MOVETO] + [paths.Path.LINETO] * (len(places) - 1)
    if a["d"].endswith("Z"):
        places, codes = [*places, places[0]], [*codes, paths.Path.CLOSEPOLY]
    return patches.PathPatch(paths.Path(places, codes), alpha=alpha, linestyle=style, **look)
