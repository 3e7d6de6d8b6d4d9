"""How images were divided: a grid of clients × classes, shaded by the number of training examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedkeep.report import wording
from fedkeep.report.blocks import Drawing, Figure
from fedkeep.report.charts import RAMP
from fedkeep.report.facts import distinct
from fedkeep.report.groups import Configuration
from fedkeep.report.svg import Canvas
from fedkeep.report.tables import Table

WIDTH, LEFT, TOP, RIGHT = 900.0, 118.0, 74.0, 52.0
MOST_NAMES = 60


def partitions(groups: Sequence[Configuration]) -> Iterator[Figure]:
    """Yield the grid of each different division of images among clients."""
    for entry, labels in distinct(groups, "partition_counts"):
        counts = entry["counts"]
        if not counts or not entry["classes"]:
            continue
        most = max(max(row) for row in counts)
        out = f" {wording.count(len(entry['opted_out']), 'client')} opted out." if entry["opted_out"] else ""
        title = "Training examples of each class" + (f" · {labels}" if labels else "")
        rows = tuple(
            (_name(entry, i), *(wording.plain(n) for n in row), wording.plain(sum(row)))
            for i, row in enumerate(counts)
        )
        columns = ("client", *(wording.printable(c) for c in entry["classes"]), "together")
        yield Figure(
            title,
            (Drawing(_grid(entry, title, most), "panel"),),
            f"A row a client, a column a class; an empty cell: none.{out}",
            ramp=("examples", "1", wording.plain(most)),
            table=Table(columns, rows),
            data=entry,
        )


def _name(entry: Mapping[str, Any], i: int) -> str:
    return wording.printable(entry["clients"][i]) + (" (out)" if i in entry["opted_out"] else "")


def _grid(entry: Mapping[str, Any], title: str, most: int) -> str:
    counts, classes = entry["counts"], entry["classes"]
    wide = min((WIDTH - LEFT - RIGHT) / len(classes), 64.0)
    tall = min(max(420.0 / len(counts), 3.0), 26.0)
    width, height = LEFT + wide * len(classes) + RIGHT, TOP + tall * len(counts) + 4
    canvas = Canvas(width, height, title)
    each = max(1, -(-len(classes) // MOST_NAMES))
    for j in range(0, len(classes), each):
        x, y = LEFT + wide * (j + 0.5), TOP - 6
        text = _short(wording.printable(classes[j]), 12)
        canvas.add("text", text, cls="small", transform=f"translate({x + 3:.1f} {y:.1f}) rotate(-40)")
    every = max(1, -(-len(counts) // max(1, int(420 / 13))))
    for i, row in enumerate(counts):
        top = TOP + tall * i
        if i % every == 0:
            canvas.text(LEFT - 8, top + tall / 2 + 4, _short(_name(entry, i), 18), "small", "end")
        for j, n in enumerate(row):
            shade = f"q{min(int(RAMP * n / most), RAMP - 1)}" if n else "frame"
            tip = f"{_name(entry, i)}\n{wording.printable(classes[j])}: {wording.count(n, 'example')}"
            canvas.add(
                "rect",
                tip=tip,
                cls=f"tip {shade}",
                x=LEFT + wide * j + 0.5,
                y=top + 0.5,
                width=max(wide - 1, 1.0),
                height=max(tall - 1, 1.0),
            )
    return canvas.svg()


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
