"""What all figures share: colours, a sheet of panels, names of axes, and how a file is written.

Colours follow Okabe and Ito (colour-blind safe). No global state of matplotlib is touched, and the same input gives the
same bytes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import ConfigError
from fedkeep.core.files import write_whole
from fedkeep.report import wording

if TYPE_CHECKING:  # it is loaded by those who draw: every command lists the papers' tables
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e4de",
    "axes.edgecolor": "#5c666f",
    "legend.frameon": False,
    "svg.hashsalt": "fedkeep",
}


def styled() -> Any:
    """Return a context in which figures have the papers' style."""
    import matplotlib as mpl

    return mpl.rc_context(STYLE)  # type: ignore[arg-type]


def new_figure(panels: int, width: float, height: float, rows: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many inches, and its panels: side by side, or in ``rows`` that share their axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=160)
    shape = (panels, 1) if rows else (1, panels)
    grid = figure.subplots(*shape, squeeze=False, sharex=rows, sharey=rows) if panels else None
    return figure, list(grid.ravel()) if grid is not None else []


def kind_of(path: Path) -> str:
    """Return what a figure's file is, by its ending: ``png`` or ``svg``.

    Raises:
        ConfigError: it is neither.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise ConfigError(f"Figures are saved as .png or .svg; got {path.name!r}.")
    return kind


def save(figure: Figure, path: Path) -> Path:
    """Write a figure by its path's ending.

    Raises:
        ConfigError: that is neither .png nor .svg.
        RunError: the file can't be written; an older one is as it was.
    """
    kind = kind_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    write_whole(path, drawn.getvalue())
    return path


def scale_of(metric: str) -> float:
    """Return what a metric's values are multiplied by: fractions are drawn in percent."""
    return 100.0 if wording.is_fraction(metric) else 1.0


def axis_name(metric: str, rest: str) -> str:
    """Return an axis's name: the metric, what else is to be said, and its unit."""
    return f"{wording.metric_name(metric)}{rest}" + (" (%)" if wording.is_fraction(metric) else "")


def plain(text: str) -> str:
    """Return text in which matplotlib sees no mathematics, and no leading underscore that hides a label."""
    text = text.replace("$", r"\$")
    return "\u200b" + text if text.startswith("_") else text
