"""Tables: rows of cells, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedkeep.report import wording


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text cells.

    Attributes:
        columns: the headings.
        rows: one tuple of cells a row, as many as headings.
        title: shown above; may be empty.
        note: shown below; may be empty.
        left: how many columns from the left hold text; the others hold numbers and are aligned right.
        bold: (row, column) of the cells that are set in bold; a cell without a value never is.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    note: str = ""
    left: int = 1
    bold: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells in a table of {len(self.columns)} columns: {row}")
        known = frozenset((i, j) for i, j in self.bold if not self.rows[i][j].startswith(wording.MISSING))
        object.__setattr__(self, "bold", known)


def to_markdown(table: TextTable, level: int = 3) -> str:
    """Return the table as Markdown; cells show as they are, whatever characters they hold."""
    lines = [f"{'#' * level} {markdown_escape(table.title)}\n"] if table.title else []
    lines.append("| " + " | ".join(map(markdown_escape, table.columns)) + " |")
    sides = [":---" if i < table.left else "---:" for i in range(len(table.columns))]
    lines.append("|" + "|".join(sides) + "|")
    for i, row in enumerate(table.rows):
        cells = [markdown_escape(cell) for cell in row]
        cells = [f"**{cell}**" if (i, j) in table.bold else cell for j, cell in enumerate(cells)]
        lines.append("| " + " | ".join(cells) + " |")
    if table.note:
        lines.append("\n" + markdown_escape(table.note))
    return "\n".join(lines) + "\n"


def markdown_escape(text: str) -> str:
    """Return text that Markdown shows as it is: no HTML, no cell ends, no emphasis, no links."""
    text = wording.printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", text)


def to_latex(table: TextTable) -> str:
    """Return the table as LaTeX: a ``tabular`` with the rules of ``booktabs``, made smaller where a column is narrower.

    Title and note are comments. Headings that are longer than all that stands below them have several lines.
    """
    sides = "".join("l" if i < table.left else "r" for i in range(len(table.columns)))
    said = [line for text in (table.title, table.note) for line in wording.printable(text).splitlines()]
    columns = zip(
        table.columns, sides, zip(*table.rows, strict=True) if table.rows else [()] * len(sides), strict=True
    )
    lines = [
        *(f"% {line}" for line in said),
        "% Wants \\usepackage{booktabs,graphicx}.",
        r"\resizebox{\ifdim\width>\columnwidth\columnwidth\else\width\fi}{!}{%",
        f"\\begin{{tabular}}{{@{{}}{sides}@{{}}}}",
        "\\toprule",
        " & ".join(_heading(name, side, cells) for name, side, cells in columns) + r" \\",
        "\\midrule",
    ]
    for i, row in enumerate(table.rows):
        cells = [latex_escape(cell) for cell in row]
        cells = [rf"\textbf{{{cell}}}" if (i, j) in table.bold else cell for j, cell in enumerate(cells)]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}}"]) + "\n"


SHORTEST = 12
"""A heading in LaTeX that has as many characters stays in one line."""


def _heading(name: str, side: str, cells: Sequence[str]) -> str:
    """Return a heading in LaTeX, in lines that are no longer than the longest cell below it."""
    lines = textwrap.wrap(name, max([SHORTEST, *map(len, cells)]), break_long_words=False) or [""]
    text = r" \\ ".join(map(latex_escape, lines))
    return text if len(lines) == 1 else rf"\shortstack[{side}]{{{text}}}"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "−": "$-$",
    "±": r"$\pm$",
    "–": "--",
    "…": r"\dots{}",
    "×": r"$\times$",
    "⋆": r"$\star$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "ε": r"$\varepsilon$",
    "[": "{[}",  # after the end of a line, LaTeX would read it as a length
} | {character: f"\\{character}" for character in "&%$#_{}"}


def latex_escape(text: str) -> str:
    """Return text that LaTeX prints as it is; signs of numbers become mathematics."""
    return "".join(_LATEX.get(character, character) for character in wording.printable(text))


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return plain values as CSV with a line of headings: numbers in full, None and NaN as empty cells.

    Text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[_csv_cell(row.get(name)) for name in columns] for row in rows])
    return file.getvalue()


def _csv_cell(value: Any) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        text = wording.printable(value)
        return f"'{text}" if text[:1] in "=+-@" and text else text
    return value


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
