"""Stored analyses: maps of user vectors, cold start, aggregation time, plain tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedkeep.report import wording
from fedkeep.report.blocks import Block, Figure, Section
from fedkeep.report.charts import SLOTS, Curve, Legend, Lines, palette_of, point_of, user_maps
from fedkeep.report.groups import Configuration
from fedkeep.report.text_tables import TextTable

Analysis = Mapping[str, Any]


def sections(groups: Sequence[Configuration]) -> Iterator[Section]:
    """Yield a section for each kind of analysis, with the figures of all runs that have it."""
    found = [(g, run, name) for g in groups for run in g.runs for name in run.analyses]
    several = sum(len(g.runs) for g in groups) > 1
    for i, name in enumerate([*MAKERS, *dict.fromkeys(n for *_, n in found if n not in MAKERS)]):
        title, maker = MAKERS.get(name, (wording.metric_name(wording.printable(name)), _table))
        blocks: list[Block] = []
        for g, run, own in found:
            if own == name:
                label = f"{g.label}, seed {run.seed}" if len(g.runs) > 1 else g.label
                blocks += maker(run.analyses[name], label if several else "")
        if blocks:
            yield Section(f"analysis-{i}", title, tuple(blocks))


def _titled(analysis: Analysis, default: str, label: str) -> str:
    title = wording.printable(analysis.get("title") or default)
    return " · ".join(filter(None, (title, label)))


def _note(analysis: Analysis) -> str:
    return wording.printable(analysis.get("note") or "")


def _map(analysis: Analysis, label: str) -> Iterator[Block]:
    panels = analysis["panels"]
    palette = palette_of(analysis)
    caption = [_note(analysis).removesuffix(".")]
    if not palette.continuous:
        caption.append(f"colour and shape: {palette.name}")
    if analysis.get("linear_cka") is not None:
        caption.append(f"linear CKA between the two: {wording.number(analysis['linear_cka'], 'linear_cka')}")
    others = not palette.continuous and any(
        p.get("trait") not in palette.places for panel in panels for p in panel["points"]
    )
    keys = list(dict.fromkeys(k for panel in panels for k in panel.get("numbers") or {}))
    rows = []
    for panel in panels:
        numbers = panel.get("numbers") or {}
        cells = [wording.number(numbers.get(k), k) for k in keys]
        rows.append((wording.printable(panel["name"]), f"{len(panel['points']):,}", *cells))
    table = TextTable(
        ("map", "users", *(wording.metric_name(wording.printable(k)) for k in keys)), tuple(rows)
    )
    yield Figure(
        _titled(analysis, "User vectors", label),
        tuple(user_maps(analysis, palette)),
        " · ".join(filter(None, caption)),
        palette.legend(others),
        palette.ramp(),
        table,
        dict(analysis),
        columns=2,
    )


def _cold_start(analysis: Analysis, label: str) -> Iterator[Block]:
    metric = analysis.get("metric", "accuracy")
    names = tuple(str(k) for k in analysis["k"])
    series = [_cold_start_curve(entry, str(i % SLOTS)) for i, entry in enumerate(cold_start_series(analysis))]
    caption = [_note(analysis)]
    if analysis.get("users") is not None and not caption[0]:
        caption.append(f"{wording.count(analysis['users'], 'user')} held out of federation.")
    if any(s.low for s in series):
        caption.append("Whiskers: ± one standard deviation.")
    table = cold_start_table(analysis)
    if not any(s.x for s in series):
        yield table
        return
    unit = " (%)" if wording.is_fraction(metric) else ""
    y_label = f"{wording.metric_name(metric)}{unit}"
    chart = Lines(
        series=tuple(s for s in series if s.x),
        x_label="own examples k, to which the private part is fitted",
        y_label=y_label,
        metric=metric,
        hover_x="k =",
        x_names=names,
        marks=True,
    )
    title = _titled(analysis, f"{wording.metric_name(metric)} against a new user's own examples", label)
    legend = tuple(Legend(s.label, s.slot, mark=point_of(s.slot)) for s in series if s.label)
    yield Figure(title, (chart,), " ".join(filter(None, caption)), legend, None, table, dict(analysis))


def cold_start_table(analysis: Analysis) -> TextTable:
    """Return the curves of a cold-start analysis as rows, and the first one's changes where they are known."""
    metric = analysis.get("metric", "accuracy")
    rows = [
        (
            wording.printable(entry.get("name") or wording.metric_name(metric)),
            *(wording.number(value, metric) for value in entry["mean"]),
        )
        for entry in cold_start_series(analysis)
    ]
    if changes := analysis.get("changes"):
        said = [wording.MISSING if c is None else wording.interval(c[0], c[1], c[2], metric) for c in changes]
        rows.append(("change from the k before (95 %)", *said))
    return TextTable(("own examples", *(str(k) for k in analysis["k"])), tuple(rows))


def cold_start_series(analysis: Analysis) -> list[Any]:
    """Return the curves of a cold-start analysis: its ``series``, or the one it is itself."""
    found: list[Any] = analysis.get("series") or [{"mean": analysis["mean"], "std": analysis.get("std")}]
    return found


def _cold_start_curve(entry: Analysis, slot: str) -> Curve:
    """Return a curve over the numbers of k; places whose mean is not known are left out."""
    std = entry.get("std") or [None] * len(entry["mean"])
    known = [
        (float(j), m, s) for j, (m, s) in enumerate(zip(entry["mean"], std, strict=True)) if m is not None
    ]
    band = [(m - s, m + s) for _, m, s in known if s is not None]
    low, high = ([b[0] for b in band], [b[1] for b in band]) if len(band) == len(known) else ([], [])
    label = wording.printable(entry.get("name") or "")
    return Curve(
        label, tuple(k[0] for k in known), tuple(k[1] for k in known), slot, False, tuple(low), tuple(high)
    )


def _time(analysis: Analysis, label: str) -> Iterator[Block]:
    pairs = sorted(
        (float(c), float(s)) for c, s in zip(analysis["cohort"], analysis["seconds"], strict=True) if c and s
    )
    if not pairs:
        return
    rows = tuple((wording.plain(c), wording.duration(s), wording.duration(s / c)) for c, s in pairs)
    table = TextTable(("clients in the cohort", "time", "time per client"), rows)
    log = pairs[-1][0] / pairs[0][0] > 20
    chart = Lines(
        series=(Curve("", tuple(c for c, _ in pairs), tuple(s for _, s in pairs), "0"),),
        x_label="clients in the cohort",
        y_label="Time per round",
        y_format=wording.duration,
        hover_x="cohort of",
        log=log,
        marks=True,
    )
    caption = " ".join(filter(None, (_note(analysis), "Both axes are logarithmic." if log else "")))
    title = _titled(analysis, "Time to combine one round's uploads", label)
    yield Figure(title, (chart,), caption, table=table, data=dict(analysis))


def _ranking(analysis: Analysis, label: str) -> Iterator[Block]:
    columns = tuple(wording.printable(c) for c in analysis["columns"])
    rows = tuple(
        (wording.metric_name(wording.printable(name)), *(wording.number(v, name) for v in values))
        for name, *values in analysis["rows"]
    )
    yield TextTable(columns, rows, label, _note(analysis))


def _table(analysis: Analysis, label: str) -> Iterator[Block]:
    columns, rows = [wording.printable(c) for c in analysis["columns"]], analysis["rows"]
    metrics = [_column_metric(name, [row[i] for row in rows]) for i, name in enumerate(columns)]
    text = [i for i in range(len(columns)) if not all(_is_number(row[i]) or row[i] is None for row in rows)]
    cells = tuple(tuple(_cell(row[i], metrics[i]) for i in range(len(columns))) for row in rows)
    title = _titled(analysis, "", label)
    yield TextTable(tuple(columns), cells, title, _note(analysis), left=max(text, default=-1) + 1)


def _column_metric(name: str, values: Sequence[Any]) -> str:
    """Return the metric that a column's heading names, where its values are fractions; else an empty string."""
    words = name.lower().replace("_", " ").split()
    fractions = all(v is None or (_is_number(v) and 0 <= v <= 1) for v in values)
    return next((m for m in ("accuracy", "auc") if m in words), "") if fractions else ""


def _cell(value: Any, metric: str) -> str:
    if _is_number(value):
        return wording.number(value, metric)
    return wording.MISSING if value is None else wording.printable(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


MAKERS: dict[str, tuple[str, Callable[[Analysis, str], Iterator[Block]]]] = {
    "embedding_map": ("Map of user vectors", _map),
    "cold_start": ("New users", _cold_start),
    "aggregation_time": ("Aggregation time", _time),
    "ranking": ("All items ranked", _ranking),
}
"""Of each kind of analysis that has a figure: the section's title, and what makes its blocks."""
