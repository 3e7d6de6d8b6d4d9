"""Figures of results as PNG or SVG files, by the path's ending; lines differ by dashes too, marks by shape."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import ConfigError
from fedkeep.report import wording
from fedkeep.report.analyses import cold_start_series
from fedkeep.report.charts import (
    COLOURS,
    GREY,
    MOST_POINTS,
    SHAPES,
    Palette,
    bin_edges,
    evenly,
    in_bins,
    palette_of,
)
from fedkeep_papers.kit.canvas import (
    axis_name,
    new_figure,
    plain,
    save,
    scale_of,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def learning_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    metric: str,
    title: str = "",
    split: str = "valid",
    best: float | None = None,
    dashed: Collection[str] = (),
) -> Path:
    """Draw a metric against epochs (FURL Fig. 3).

    Args:
        curves: by name, (epoch, value) pairs.
        path: ends in .png or .svg.
        metric: fractions are drawn in percent.
        title: above the figure.
        split: where it was measured.
        best: the best possible value, a dotted line.
        dashed: names of curves to draw with dashes.
    """
    with styled():
        figure, (axes,) = new_figure(1, 7.2, 4.2)
        scale = scale_of(metric)
        for i, (name, pairs) in enumerate(curves.items()):
            style: Any = (0, (5, 3)) if name in dashed else "-"
            xs, ys = [x for x, _ in pairs], [scale * y for _, y in pairs]
            axes.plot(
                xs, ys, linestyle=style, color=COLOURS[i % len(COLOURS)], label=plain(name), linewidth=1.8
            )
        if best is not None:
            axes.axhline(scale * best, color="#1d2328", linestyle=":", linewidth=1.2, label="best possible")
        axes.set_xlabel("epochs (passes over the training data)")
        axes.set_ylabel(axis_name(metric, f" on {split}"))
        axes.set_title(title, fontsize=10, parse_math=False)
        figure.legend(loc="outside lower center", ncols=2)
        return save(figure, path)


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


def embedding_map(analysis: Mapping[str, Any], path: Path) -> Path:
    """Draw the panels of an ``embedding_map`` analysis side by side, in common colours."""
    with styled():
        panels = analysis["panels"]
        palette = palette_of(analysis)
        figure, every = new_figure(len(panels), 4.1 * len(panels), 4.7)
        for axes, panel in zip(every, panels, strict=True):
            points = evenly(panel["points"], MOST_POINTS)
            size = 26 if len(points) <= 150 else 16 if len(points) <= 600 else 9
            shown = _scatter_numbers(axes, points, palette, size) if palette.continuous else None
            if not palette.continuous:
                _scatter_categories(axes, points, palette, size)
            numbers = panel.get("numbers") or {}
            words = "\n".join(
                f"{wording.metric_inline(k)} {wording.number(v, k)}" for k, v in numbers.items()
            )
            axes.set_title(panel["name"] + (f"\n{words}" if words else ""), fontsize=9.5, parse_math=False)
            axes.set_aspect("equal", adjustable="datalim")
            axes.set(xticks=[], yticks=[], xlabel="map axis 1 (no unit)", ylabel="map axis 2 (no unit)")
        if palette.continuous and shown is not None:
            figure.colorbar(shown, ax=every, label=palette.name, shrink=0.8)
        elif every:
            handles, labels = every[0].get_legend_handles_labels()
            if handles:
                columns = min(len(labels), 4)
                figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=palette.name)
        return save(figure, path)


def _scatter_numbers(axes: Axes, points: Sequence[Mapping[str, Any]], palette: Palette, size: float) -> Any:
    known = [p for p in points if p.get("trait") is not None]
    rest = [p for p in points if p.get("trait") is None]
    axes.scatter([p["x"] for p in rest], [p["y"] for p in rest], c=GREY, s=size, linewidths=0)
    return axes.scatter(
        [p["x"] for p in known],
        [p["y"] for p in known],
        c=[p["trait"] for p in known],
        s=size,
        cmap="cividis",
        vmin=palette.low,
        vmax=palette.high,
        linewidths=0,
    )


def _scatter_categories(
    axes: Axes, points: Sequence[Mapping[str, Any]], palette: Palette, size: float
) -> None:
    for trait, i in (*palette.places.items(), (None, -1)):
        own = [
            p for p in points if (p.get("trait") == trait if i >= 0 else p.get("trait") not in palette.places)
        ]
        if own or i >= 0:
            label = palette.text(trait) if i >= 0 else "other"
            axes.scatter(
                [p["x"] for p in own],
                [p["y"] for p in own],
                color=COLOURS[i] if i >= 0 else GREY,
                s=size,
                marker=SHAPES[i] if i >= 0 else "o",
                alpha=0.85,
                linewidths=0,
                label=plain(label),
            )


def client_distribution(
    values: Mapping[str, Mapping[str, float] | Sequence[float]], path: Path, *, metric: str, title: str = ""
) -> Path:
    """Draw how a metric is spread over users: a histogram each, one below the other, the mean as a line.

    Args:
        values: by configuration, the users' values, with or without their ids; NaN is left out.
        path: ends in .png or .svg.
        metric: fractions are drawn in percent.
        title: above the figure.
    """
    with styled():
        own = {name: list(v.values() if isinstance(v, Mapping) else v) for name, v in values.items()}
        own = {name: [x for x in v if math.isfinite(x)] for name, v in own.items()}
        own = {name: v for name, v in own.items() if v}
        if not own:
            raise ConfigError("A distribution over users needs at least one value.")
        figure, every = new_figure(len(own), 7.2, 1.2 + 1.15 * len(own), rows=True)
        scale = scale_of(metric)
        edges = bin_edges([x for v in own.values() for x in v], wording.is_fraction(metric))
        for i, (axes, (name, users)) in enumerate(zip(every, own.items(), strict=True)):
            heights = [100 * n / len(users) for n in in_bins(users, edges)]
            axes.stairs(heights, [scale * e for e in edges], fill=True, color=COLOURS[i % len(COLOURS)])
            mean = sum(users) / len(users)
            axes.axvline(scale * mean, color="#1d2328", linewidth=1.2)
            words = f"{name}: mean {wording.number(mean, metric)}"
            axes.set_title(words, loc="left", fontsize=9.5, parse_math=False)
            axes.set_ylabel("% of users")
            axes.label_outer()
        every[-1].set_xlabel(axis_name(metric, " of a user"))
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


def aggregation_time(analysis: Mapping[str, Any], path: Path) -> Path:
    """Draw an ``aggregation_time`` analysis: seconds against cohort size, both by logarithm, and a line of slope 1."""
    with styled():
        figure, (axes,) = new_figure(1, 5.4, 3.8)
        pairs = sorted(
            (c, s) for c, s in zip(analysis["cohort"], analysis["seconds"], strict=True) if c and s
        )
        cohort, seconds = [c for c, _ in pairs], [s for _, s in pairs]
        axes.loglog(cohort, seconds, "o-", color=COLOURS[0], label="measured")
        if pairs:
            linear = [seconds[-1] * c / cohort[-1] for c in cohort]
            axes.loglog(cohort, linear, ":", color="#5c666f", label="in proportion to the cohort")
        axes.set_xlabel("clients in the cohort")
        axes.set_ylabel("time to combine a round's uploads (s)")
        axes.legend()
        return save(figure, path)


def cold_start(analysis: Mapping[str, Any], path: Path) -> Path:
    """Draw a ``cold_start`` analysis: the metric against k own examples, ± one standard deviation."""
    with styled():
        figure, (axes,) = new_figure(1, 6.2, 3.8)
        metric = analysis.get("metric", "accuracy")
        scale, names = scale_of(metric), [str(k) for k in analysis["k"]]
        for i, entry in enumerate(cold_start_series(analysis)):
            std = entry.get("std") or [None] * len(names)
            known = [
                (j, m, s) for j, (m, s) in enumerate(zip(entry["mean"], std, strict=True)) if m is not None
            ]
            axes.errorbar(
                [j for j, *_ in known],
                [scale * m for _, m, _ in known],
                yerr=[scale * (s or 0) for *_, s in known],
                fmt="o-",
                color=COLOURS[i % len(COLOURS)],
                capsize=2,
                label=plain(entry.get("name") or ""),
            )
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("own examples k, to which the private part is fitted")
        axes.set_ylabel(axis_name(metric, " of new users"))
        if "users" in analysis and any(entry.get("std") for entry in cold_start_series(analysis)):
            axes.set_title(f"mean ± standard deviation over {analysis['users']} users", fontsize=9.5)
        if "series" in analysis:
            axes.legend()
        return save(figure, path)


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
