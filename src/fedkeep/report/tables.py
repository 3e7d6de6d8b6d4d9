"""Tables: rows of cells, as Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fedkeep.report import wording


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells.

    Attributes:
        columns: the headings.
        rows: one tuple of cells a row, as many as headings.
        title: shown above; may be empty.
        note: shown below; may be empty.
        left: how many columns from the left hold text; the others hold numbers and are aligned right.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    note: str = ""
    left: int = 1

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells in a table of {len(self.columns)} columns: {row}")


def to_markdown(table: Table, level: int = 3) -> str:
    """Return the table as Markdown; cells show as they are, whatever characters they hold."""
    lines = [f"{'#' * level} {markdown_escape(table.title)}\n"] if table.title else []
    lines.append("| " + " | ".join(map(markdown_escape, table.columns)) + " |")
    sides = [":---" if i < table.left else "---:" for i in range(len(table.columns))]
    lines.append("|" + "|".join(sides) + "|")
    lines += ["| " + " | ".join(map(markdown_escape, row)) + " |" for row in table.rows]
    if table.note:
        lines.append("\n" + markdown_escape(table.note))
    return "\n".join(lines) + "\n"


def markdown_escape(text: str) -> str:
    """Return text that Markdown shows as it is: no HTML, no cell ends, no emphasis, no links."""
    text = wording.printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", text)


def mean_std(values: Iterable[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation (n − 1); None instead of a deviation of one value.

    NaN for no value at all.
    """
    numbers = list(values)
    if not numbers:
        return math.nan, None
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in numbers) / (len(numbers) - 1))
