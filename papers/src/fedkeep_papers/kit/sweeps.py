"""Figures of sweeps: accuracy against a setting in panels side by side, and heat maps of differences.

As in ``plots``: PNG or SVG by the path's ending, colours for the colour-blind, the same bytes for the same input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkeep.core.errors import ConfigError
from fedkeep.report import wording
from fedkeep.report.charts import COLOURS, GREY, SHAPES
from fedkeep_papers.kit.canvas import (
    axis_name,
    new_figure,
    plain,
    save,
    scale_of,
    styled,
)

Points = Sequence[tuple[float, float, float | None]]


def sweep_panels(
    panels: Mapping[str, Mapping[str, Points]],
    path: Path,
    *,
    metric: str,
    setting: str,
    published: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]] | None = None,
) -> Path:
    """Draw a metric against a setting, a panel a scene, with deviations as bands (mixture of experts, Figures 2-4).

    Args:
        panels: by panel and curve, (setting, mean, deviation or None) points.
        path: ends in .png or .svg.
        metric: fractions are drawn in percent.
        setting: the horizontal axis's name.
        published: by panel and curve, (setting, value) points, drawn thin and dashed in the curve's colour.

    Raises:
        ConfigError: there is no point, or the path's ending is neither .png nor .svg.
    """
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    if not any(points for curves in panels.values() for points in curves.values()):
        raise ConfigError("A sweep needs at least one point.")
    scale = scale_of(metric)
    with styled():
        figure, every = new_figure(len(panels), 1.0 + 3.6 * len(panels), 3.9)
        for axes, (title, curves) in zip(every, panels.items(), strict=True):
            for name, points in curves.items():
                place = names.index(name)
                colour = COLOURS[place % len(COLOURS)]
                known = sorted((x, scale * m, scale * (s or 0.0)) for x, m, s in points if math.isfinite(m))
                xs, means = [x for x, _, _ in known], [m for _, m, _ in known]
                axes.plot(
                    xs,
                    means,
                    color=colour,
                    marker=SHAPES[place % len(SHAPES)],
                    markersize=4,
                    label=plain(name),
                )
                low, high = [m - s for _, m, s in known], [m + s for _, m, s in known]
                axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
            for name, pairs in ((published or {}).get(title) or {}).items():
                if name in names:
                    axes.plot(
                        [x for x, _ in pairs],
                        [scale * y for _, y in pairs],
                        linestyle=(0, (4, 3)),
                        linewidth=1.0,
                        color=COLOURS[names.index(name) % len(COLOURS)],
                        alpha=0.8,
                    )
            axes.set_title(title, fontsize=10, parse_math=False)
            axes.set_xlabel(setting)
        every[0].set_ylabel(axis_name(metric, ""))
        limits = [axes.get_ylim() for axes in every]
        for axes in every:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=_columns(len(names)))
        return save(figure, path)


def _columns(entries: int, most: int = 4) -> int:
    """Return the columns of a legend whose lines are alike in length."""
    return math.ceil(entries / math.ceil(entries / most))


def difference_maps(
    panels: Mapping[str, Mapping[tuple[str, str], float]],
    path: Path,
    *,
    metric: str,
    across: str,
    down: str,
    label: str,
) -> Path:
    """Draw heat maps of differences: blue above zero, orange below, the numbers written (mixture of experts, Figure 5).

    Args:
        panels: by panel, a difference for each (row, column); cells that are missing stay grey.
        path: ends in .png or .svg.
        metric: differences of fractions are in percentage points.
        across, down: the axes' names.
        label: the colours' name.

    Raises:
        ConfigError: there is no cell, or the path's ending is neither .png nor .svg.
    """
    cells = [cell for own in panels.values() for cell in own]
    if not cells:
        raise ConfigError("A heat map needs at least one cell.")
    rows, columns = list(dict.fromkeys(r for r, _ in cells)), list(dict.fromkeys(c for _, c in cells))
    scale = scale_of(metric)
    most = max(abs(scale * v) for own in panels.values() for v in own.values()) or 1.0
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("differences", [COLOURS[1], "#ffffff", COLOURS[0]])
    with styled():
        size = (1.6 + (0.75 * len(columns) + 1.2) * len(panels), max(1.9 + 0.5 * len(rows), 3.0))
        figure, every = new_figure(len(panels), *size)
        shown: Any = None
        for axes, (title, own) in zip(every, panels.items(), strict=True):
            grid = [[scale * own.get((r, c), math.nan) for c in columns] for r in rows]
            shown = axes.imshow(grid, cmap=shades, vmin=-most, vmax=most, aspect="auto")
            for i, values in enumerate(grid):
                for j, value in enumerate(values):
                    if math.isfinite(value):
                        text = f"{value:+.1f}".replace("-", "−")
                        text = text[1:] if text[1:] == "0.0" else text
                        colour = "white" if abs(value) > 0.65 * most else "#1d2328"
                        axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
            axes.set_facecolor(GREY)  # shows where a cell is missing
            axes.grid(visible=False)
            axes.tick_params(length=0)
            axes.set_xticks(range(len(columns)), [plain(c) for c in columns])
            axes.set_yticks(range(len(rows)), [plain(r) for r in rows])
            axes.set_title(title, fontsize=10, parse_math=False)
            axes.set(xlabel=across, ylabel=down)
        unit = " (percentage points)" if wording.is_fraction(metric) else ""
        figure.colorbar(shown, ax=every, label=label + unit, shrink=0.9)
        return save(figure, path)
