"""Figures of results as PNG or SVG files, by the path's ending; lines differ by dashes too, marks by shape."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import ConfigError
from fedkeep.core.files import write_whole
from fedkeep.report.blocks import Figure
from fedkeep.report.charts import COLOURS, GREY, LOOKS, Legend, Lines, Series, Spread, Strip
from fedkeep_papers.kit.canvas import (
    axis_name,
    kind_of,
    new_figure,
    plain,
    save,
    scale_of,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def learning_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, metric: str, title: str
) -> Path:
    """Draw a metric on valid against epochs (FURL Fig. 3): by name, (epoch, value) pairs."""
    series = [
        Series(name, tuple(x for x, _ in pairs), tuple(y for _, y in pairs), str(i % LOOKS))
        for i, (name, pairs) in enumerate(curves.items())
        if pairs
    ]
    chart = Lines(
        series=tuple(series),
        x_label="epochs (passes over the training data)",
        y_label=axis_name(metric, " on valid"),
        heading=title,
        metric=metric,
    )
    return write(Figure(title, (chart,), legend=tuple(Legend(s.label, s.slot) for s in series)), path)


def client_distribution(values: Mapping[str, Sequence[float]], path: Path, *, metric: str) -> Path:
    """Draw how a metric is spread over users, a histogram each, by name; NaN is left out.

    Raises:
        ConfigError: there is no value.
    """
    known = {name: tuple(v for v in own if math.isfinite(v)) for name, own in values.items()}
    strips = [Strip(name, str(i % LOOKS), own) for i, (name, own) in enumerate(known.items()) if own]
    if not strips:
        raise ConfigError("A distribution over users needs at least one value.")
    return write(Figure(axis_name(metric, " of a user"), (Spread(tuple(strips), metric),)), path)


def write(figure: Figure, path: Path) -> Path:
    """Write a figure of a report by the path's ending.

    Raises:
        ConfigError: that is neither .png nor .svg.
        RunError: the file can't be written; an older one is as it was.
    """
    from fedkeep.report.drawing import Drawing

    kind = kind_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, Drawing(figure).file(kind))
    return path


def panels_of_curves(
    panels: Sequence[tuple[str, str, Mapping[str, Sequence[tuple[float, float]]]]],
    path: Path,
    *,
    title: str = "",
    logarithmic: bool = False,
) -> Path:
    """Draw curves in panels side by side; a name has the same colour and line in all of them (KTEPS Figs. 4 and 5).

    Args:
        panels: for each, what runs along it, the metric along its side (a fraction, drawn in percent), and by name the
            curve's points.
        path: ends in .png or .svg.
        title: above the figure.
        logarithmic: what runs along the panels does so by powers; it is written at the points of the curves.

    Raises:
        ConfigError: there is no curve, or the path's ending is neither .png nor .svg.
    """
    names = list(dict.fromkeys(name for _, _, curves in panels for name in curves))
    if not names:
        raise ConfigError("A figure of curves needs at least one.")
    dashes: list[Any] = ["-", (0, (5, 2)), (0, (1, 1.5))]
    looks = {
        name: {"color": COLOURS[i % len(COLOURS)], "linestyle": dashes[i // len(COLOURS) % len(dashes)]}
        for i, name in enumerate(names)
    }
    with styled():
        figure, every = new_figure(len(panels), 6.0 * len(panels), 4.6)
        seen = {}
        for axes, (along, side, curves) in zip(every, panels, strict=True):
            for name, pairs in curves.items():
                xs, ys = [x for x, _ in pairs], [100 * y for _, y in pairs]
                (seen[name],) = axes.plot(xs, ys, linewidth=1.8, **looks[name])
            if logarithmic:
                points = sorted({x for pairs in curves.values() for x, _ in pairs})
                axes.set_xscale("log")
                axes.set_xticks(points, [f"{x:g}" for x in points])
                axes.minorticks_off()
            axes.set_xlabel(along)
            axes.set_ylabel(f"{side}, %")
        # as many labels side by side as there is width for
        fitting = 65 * len(panels) // (8 + max(map(len, names)))
        figure.legend(
            [seen[name] for name in names],
            [plain(name) for name in names],
            loc="outside lower center",
            ncols=max(1, min(6, fitting)),
        )
        if title:
            figure.suptitle(title.replace("$", r"\$"), fontsize=10)
        return save(figure, path)


def comparison_bars(
    rows: Sequence[tuple[str, float | None, float | None]],
    path: Path,
    *,
    metric: str,
    title: str = "",
    std: Mapping[str, float] | None = None,
) -> Path:
    """Draw ours beside the published, a pair of bars a method (FURL Fig. 2).

    Args:
        rows: (method, ours, published); None and NaN have no bar.
        path: ends in .png or .svg.
        metric: fractions are drawn in percent.
        title: above the figure.
        std: deviations of ours over seeds by method, drawn as whiskers.

    Raises:
        ConfigError: there is no row, or the path's ending is neither .png nor .svg.
    """
    if not rows:
        raise ConfigError("Bars need at least one row of results.")
    with styled():
        figure, (axes,) = new_figure(1, max(1.3 * len(rows) + 0.8, 4.5), 4.0)
        scale, places = scale_of(metric), range(len(rows))
        errors = [scale * (std or {}).get(name, 0.0) for name, _, _ in rows]
        published = [p for _, _, p in rows]
        pairs = any(p is not None for p in published)
        _bars(axes, -0.2 if pairs else 0.0, [o for _, o, _ in rows], errors, scale, "ours")
        if pairs:
            _bars(axes, 0.2, published, [0.0] * len(rows), scale, "published")
        axes.set_xticks(places, [plain(textwrap.fill(name, 13)) for name, _, _ in rows], fontsize=8.5)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(axis_name(metric, ""))
        axes.set_title(title, fontsize=10, parse_math=False)
        axes.margins(y=0.12)
        figure.legend(loc="outside lower center", ncols=2)
        return save(figure, path)


def _bars(
    axes: Axes, shift: float, values: Sequence[float | None], errors: Sequence[float], scale: float, who: str
) -> None:
    known = [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    xs, heights, spans = (
        [i + shift for i, _ in known],
        [scale * v for _, v in known],
        [errors[i] for i, _ in known],
    )
    face = COLOURS[0] if who == "ours" else "#d9eaf4"
    yerr = [span or math.nan for span in spans] if any(spans) else None  # one seed has no whisker
    axes.bar(xs, heights, 0.38, yerr=yerr, color=face, edgecolor=COLOURS[0], label=who, capsize=2)
    for x, height, span in zip(xs, heights, spans, strict=True):
        place = (x, height + span)
        text = f"{height + 1e-9:.1f}" if scale == 100 else f"{height:.3g}"  # 84.05 is 84.0499… in binary
        axes.annotate(text, place, (0, 3), textcoords="offset points", ha="center", fontsize=8)


def partition_plot(
    counts: Sequence[Sequence[int]],
    path: Path,
    *,
    clients: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    title: str = "",
    opted_out: Collection[int] = (),
) -> Path:
    """Draw how many examples of each class each client has: a heat map, a row a client.

    Args:
        counts: (clients, classes), e.g. ``fedkeep.data.class_counts(data, "train")``.
        path: ends in .png or .svg.
        clients: names; numbers where None.
        classes: names; numbers where None.
        title: above the figure.
        opted_out: rows whose clients opted out, marked behind their names.

    Raises:
        ConfigError: there is no cell, rows differ in length, or names don't fit them.
    """
    rows, columns = len(counts), len(counts[0]) if len(counts) else 0
    names = [str(name) for name in (clients if clients is not None else range(rows))]
    heads = [str(name) for name in (classes if classes is not None else range(columns))]
    if (
        not columns
        or {len(row) for row in counts} != {columns}
        or (len(names), len(heads)) != (rows, columns)
    ):
        raise ConfigError(
            f"A plot of a partition needs a number per client and class; got {rows} × {columns} numbers, {len(names)} "
            f"client names and {len(heads)} class names."
        )
    names = [f"{name} (out)" if i in opted_out else name for i, name in enumerate(names)]
    most = max(max(row) for row in counts)
    written = rows <= 12 and columns <= 20
    cell = 0.5 if written else 0.16
    with styled():
        width, height = min(max(cell * columns + 2.4, 4.5), 14), min(max(cell * rows * 0.8 + 1.7, 2.8), 12)
        figure, (axes,) = new_figure(1, width, height)
        axes.grid(visible=False)
        shades = axes.imshow(
            [list(row) for row in counts], cmap="Blues", vmin=0, vmax=max(most, 1), aspect="auto"
        )
        _ticks(axes, names, heads)
        for i, row in enumerate(counts if written else ()):
            for j, n in enumerate(row):
                colour = "white" if n > 0.6 * most else "#1d2328" if n else GREY
                axes.text(j, i, f"{n:,}", ha="center", va="center", fontsize=7.5, color=colour)
        axes.set_title(title, fontsize=10, parse_math=False)
        figure.colorbar(shades, ax=axes, label="examples", shrink=0.9)
        return save(figure, path)


def _ticks(axes: Axes, names: Sequence[str], heads: Sequence[str]) -> None:
    down, across = max(1, -(-len(names) // 50)), max(1, -(-len(heads) // 50))  # at most 50 names an axis
    axes.set_yticks(range(0, len(names), down), [plain(name) for name in names[::down]], fontsize=8)
    axes.set_xticks(range(0, len(heads), across), [plain(head) for head in heads[::across]], fontsize=8)
    axes.tick_params(length=0)
    turned: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    for label in axes.get_xticklabels():
        label.set(**turned if len(heads) <= 20 else {"rotation": 90})
    axes.set_xlabel("class")
    axes.set_ylabel("client")
