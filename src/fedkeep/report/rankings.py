"""How methods rank all items, from what their runs keep as the analysis ``ranking``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedkeep.report import wording
from fedkeep.report.groups import Configuration
from fedkeep.report.tables import Table, mean_std

RANKING = "ranking"
Rows = list[dict[str, Any]]


def ranking_table(groups: Sequence[Configuration]) -> tuple[Table, Rows] | None:
    """Return a line for each method, then counting, and the same as plain values; None where a run keeps no ranking."""
    found = {g.label: [run.analyses.get(RANKING) for run in g.runs] for g in groups}
    if not found or not all(all(own) for own in found.values()):
        return None
    first: Mapping[str, Any] = next(iter(found.values()))[0] or {}
    columns = {label: [_of(one, 1) for one in own if one] for label, own in found.items()}
    columns[first["columns"][2]] = [_of(first, 2)]
    metrics = list(_of(first, 1))
    rows: Rows = []
    for label, own in columns.items():
        for metric in metrics:
            mean, std = mean_std(one[metric] for one in own)
            rows.append({"method": label, "metric": metric, "mean": mean, "std": std, "seeds": len(own)})
    cells = {(row["method"], row["metric"]): row for row in rows}
    shown = tuple(
        (label, *(wording.spread(cells[label, m]["mean"], cells[label, m]["std"], m) for m in metrics))
        for label in columns
    )
    note = f"{wording.printable(first['note'])} Means over users at each run's best round; no test says what of a difference is chance."
    if any(len(own) > 1 for own in columns.values()):
        note += " ± is the sample standard deviation over seeds."
    heads = ("method", *map(wording.metric_name, metrics))
    return Table(heads, shown, wording.printable(first["title"]), note), rows


def _of(analysis: Mapping[str, Any], column: int) -> dict[str, float]:
    return {row[0]: row[column] for row in analysis["rows"]}
