"""A figure's legend as part of a drawing, for files that stand without the page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from xml.etree import ElementTree

from fedkeep.report.blocks import Legend
from fedkeep.report.svg import Canvas

KEY, LETTER, LINE, GAP, EDGE = 34.0, 7.6, 19.0, 22.0, 14.0


def with_legend(drawing: ElementTree.Element, legend: Sequence[Legend]) -> ElementTree.Element:
    """Return a drawing and under it the legend of what it draws and does not name itself."""
    texts = {"".join(e.itertext()) for e in drawing.iter("text")}
    looks = {name for e in drawing.iter() for name in e.attrib.get("class", "").split()}
    own = [e for e in legend if e.label not in texts and f"s{e.slot}" in looks]
    if not own:
        return drawing
    _, _, width, height = map(float, drawing.attrib["viewBox"].split())
    canvas = Canvas(width, height, drawing.attrib["aria-label"])
    x, y = EDGE, height + LINE
    for entry in own:
        lines = textwrap.wrap(entry.label, int((width - 2 * EDGE - KEY) / LETTER)) or [""]
        wide = KEY + LETTER * max(map(len, lines))
        if x > EDGE and x + wide > width - EDGE:
            x, y = EDGE, y + LINE
        _key(canvas, entry, x, y)
        for i, line in enumerate(lines):
            canvas.text(x + KEY, y + LINE * i + 4, line, "name")
        x, y = x + wide + GAP, y + LINE * (len(lines) - 1)
    whole = ElementTree.fromstring(canvas.svg())  # noqa: S314  (our own output)
    whole.attrib["viewBox"] = f"0 0 {width:g} {y + LINE:g}"
    whole[:0] = list(drawing)
    return whole


def _key(canvas: Canvas, entry: Legend, x: float, y: float) -> None:
    """Draw an entry's line or mark before its text."""
    if entry.shape == "line":
        cls = f"line s{entry.slot}" + (" dashed" if entry.dashed else "")
        canvas.add("path", cls=cls, d=f"M{x:.1f},{y:.1f}L{x + 26:.1f},{y:.1f}")
    if mark := entry.mark if entry.shape == "line" else entry.shape:
        hollow = mark == "hollow"
        canvas.mark(
            x + 13, y, 4, "square" if hollow else mark, f"{'hollow' if hollow else 'fill'} s{entry.slot}"
        )
