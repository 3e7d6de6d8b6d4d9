"""The papers' figures, of the same charts as a report's; lines differ by dashes and marks too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fedkeep.report import wording
from fedkeep.report.blocks import Figure
from fedkeep.report.charts import (
    LOOKS,
    Bar,
    Bars,
    Curve,
    Grid,
    Legend,
    Lines,
    Spread,
    Strip,
    mark_of,
    point_of,
)

Pairs = Sequence[tuple[float, float]]
Points = Sequence[tuple[float, float, float | None]]


def write(figure: Figure, folder: Path, name: str) -> Path:
    """Write a figure as SVG, PDF and PNG beside one another; return the last one's path.

    Raises:
        RunError: a file can't be written; an older one is as it was.
    """
    from fedkeep.report.drawing import write_figure

    return write_figure(figure, folder, name)[-1]


def bars_figure(title: str, bars: Sequence[Bar], metric: str, heading: str = "") -> Figure:
    """Return bars of ours, beside the published where any is known."""
    chart = Bars(tuple(bars), metric, heading)
    legend = (Legend("ours", "0", "s"), Legend("published", "0", "hollow")) if chart.paired else ()
    return Figure(title, (chart,), legend=legend, data=[asdict(bar) for bar in bars])


def learning_curves(curves: Mapping[str, Pairs], *, metric: str, title: str) -> Figure:
    """Return a metric on valid against epochs (FURL Fig. 3): by name, (epoch, value) pairs."""
    known = {name: pairs for name, pairs in curves.items() if pairs}
    x_label = "epochs (passes over the training data)"
    return panels_of_curves([(x_label, f"{wording.metric_name(metric)} on valid", known)], metric, title)


def panels_of_curves(
    panels: Sequence[tuple[str, str, Mapping[str, Pairs]]],
    metric: str,
    title: str,
    places: Sequence[float] = (),
) -> Figure:
    """Return curves in panels side by side; a name has the same look in all of them (KTEPS Figs. 4 and 5).

    Args:
        panels: for each, what runs along it, what along its side, and by name the curve's points.
        metric: says how values are written.
        title: above the figure.
        places: all that x can be, where it is a list of cases and not a quantity.
    """
    panels = [panel for panel in panels if panel[2]]
    names = list(dict.fromkeys(name for _, _, curves in panels for name in curves))
    looks = {name: str(i % LOOKS) for i, name in enumerate(names)}
    at = {place: float(i) for i, place in enumerate(places)}
    charts = [
        Lines(
            series=tuple(
                Curve(
                    name,
                    tuple(at.get(x, float(x)) for x, _ in pairs),
                    tuple(y for _, y in pairs),
                    looks[name],
                )
                for name, pairs in curves.items()
            ),
            x_label=along,
            y_label=_axis(side, metric),
            heading=title if i == 0 else " ",
            metric=metric,
            x_names=tuple(f"{place:g}" for place in places),
            marks=bool(places),
        )
        for i, (along, side, curves) in enumerate(panels)
    ]
    mark = point_of if places else mark_of if any(chart.many for chart in charts) else lambda _: ""
    legend = tuple(Legend(name, slot, mark=mark(slot)) for name, slot in looks.items())
    return Figure(title, tuple(charts), legend=legend, columns=len(charts))


def client_distribution(values: Mapping[str, Sequence[float]], *, metric: str) -> Figure:
    """Return how a metric is spread over users, a histogram each, by name; NaN is left out."""
    known = {name: tuple(v for v in own if math.isfinite(v)) for name, own in values.items()}
    strips = [Strip(name, str(i % LOOKS), own) for i, (name, own) in enumerate(known.items()) if own]
    return Figure(f"{wording.metric_name(metric)} of a user", (Spread(tuple(strips), metric),))


def sweep_panels(
    panels: Mapping[str, Mapping[str, Points]],
    *,
    metric: str,
    setting: str,
    published: Mapping[str, Mapping[str, Pairs]] | None = None,
) -> Figure:
    """Return a metric against a setting, a panel a scene, with deviations as bands (mixture of experts, Figures 2-4).

    Args:
        panels: by panel and curve, (setting, mean, deviation or None) points.
        metric: says how values are written.
        setting: the horizontal axis's name.
        published: by panel and curve, (setting, value) points, drawn dashed in the curve's colour.
    """
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    slots = {name: str(i) for i, name in enumerate(names)}
    beside = published or {}
    charts = []
    for title, curves in panels.items():
        series = [_swept(name, points, slots[name]) for name, points in curves.items() if points]
        for name, pairs in beside.get(title, {}).items():
            if name in slots:
                x, y = (tuple(values) for values in zip(*pairs, strict=True))
                series.append(Curve(f"{name}, published", x, y, slots[name], dashed=True))
        chart = Lines(
            series=tuple(series),
            x_label=setting,
            y_label=_axis(wording.metric_name(metric), metric),
            heading=title,
            metric=metric,
            marks=True,
        )
        charts.append(chart)
    legend = [Legend(name, slot, mark=point_of(slot)) for name, slot in slots.items()]
    legend += (
        [Legend("published", "x", dashed=True)] if any(s.dashed for c in charts for s in c.series) else []
    )
    return Figure(
        f"{wording.metric_name(metric)} against {setting}",
        tuple(charts),
        legend=tuple(legend),
        columns=len(charts),
        same_scale=True,
    )


def _swept(name: str, points: Points, slot: str) -> Curve:
    known = sorted((x, m, s or 0.0) for x, m, s in points if math.isfinite(m))
    low, high = ((tuple(m + sign * s for _, m, s in known)) for sign in (-1, 1))
    return Curve(name, tuple(x for x, *_ in known), tuple(m for _, m, _ in known), slot, False, low, high)


def difference_maps(
    panels: Mapping[str, Mapping[tuple[str, str], float]],
    *,
    metric: str,
    across: str,
    down: str,
    label: str,
) -> Figure:
    """Return maps of differences: blue above zero, orange below, the numbers written (mixture of experts, Figure 5).

    Args:
        panels: by panel, a difference for each (row, column); cells that are missing stay grey.
        metric: differences of fractions are in percentage points.
        across, down: the axes' names.
        label: what is the difference of what.
    """
    cells = [cell for own in panels.values() for cell in own]
    rows, columns = list(dict.fromkeys(r for r, _ in cells)), list(dict.fromkeys(c for _, c in cells))
    charts = [
        Grid(
            values=tuple(tuple(own.get((r, c)) for c in columns) for r in rows),
            rows=tuple(rows),
            columns=tuple(columns),
            heading=title,
            x_label=across,
            y_label=down,
            write=_points,
            tell=partial(wording.difference, metric=metric),
            signed=True,
        )
        for title, own in panels.items()
    ]
    unit = " (percentage points)" if wording.is_fraction(metric) else ""
    legend = (Legend(f"{label}{unit}: above 0", "0", "s"), Legend("below 0", "1", "s"))
    return Figure(label, tuple(charts), legend=legend, columns=len(charts))


def _points(difference: float) -> str:
    """Write a difference of fractions in points."""
    text = f"{100 * difference:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def _axis(name: str, metric: str) -> str:
    return f"{name} (%)" if wording.is_fraction(metric) else name
