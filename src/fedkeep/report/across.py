"""Methods over several data sets, or over groups of users, in one table.

The average rank is that of Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 7 (2006), §3.2.2:
on each data set the best method has rank 1, the next 2, equals share the mean of their ranks; a method's ranks are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.records import by_key
from fedkeep.metrics.worth.best import standings
from fedkeep.report import wording
from fedkeep.report.blocks import Content, Section, Text
from fedkeep.report.page import write_content
from fedkeep.report.standings import (
    Compared,
    FoundComparison,
    in_paper,
    said,
    unlike,
    write_document,
    write_table,
)
from fedkeep.report.text_tables import TextTable, mean_std

RANK = "average rank"


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, the largest has 1; equals share the mean of theirs, and NaN are last of all."""
    known = [-math.inf if math.isnan(v) else v for v in values]
    return [1 + sum(o > v for o in known) + (sum(o == v for o in known) - 1) / 2 for v in known]


def average_ranks(found: Sequence[Compared]) -> dict[str, float]:
    """Return the average rank of every method that is in all comparisons, among these."""
    common = [n for n in found[0].labels if all(n in c.labels for c in found)]
    each = [ranks([c.standings[c.labels.index(n)].mean for n in common]) for c in found]
    return {n: math.fsum(own) / len(found) for n, own in zip(common, zip(*each, strict=True), strict=True)}


def _labels(found: Sequence[Compared]) -> list[str]:
    return list(dict.fromkeys(label for c in found for label in c.labels))


def side_by_side(columns: Mapping[str, Compared], rank: bool = True) -> TextTable:
    """Return a line for each method: its mean in each comparison, and its average rank.

    Args:
        columns: comparisons by name: of data sets, or of groups of users.
        rank: whether the average rank is shown.
    """
    found, names = list(columns.values()), _labels(list(columns.values()))
    averages = average_ranks(found) if rank else {}
    rows, bold = [], set()
    for i, label in enumerate(names):
        cells = []
        for j, c in enumerate(found, 1):
            there = label in c.labels
            s = c.standings[c.labels.index(label)] if there else None
            cells.append(c.value(s) if s else wording.MISSING)
            if s is not None and s.close:
                bold.add((i, j))
        if rank:
            cells.append(f"{averages[label]:.2f}" if label in averages else wording.MISSING)
        rows.append((label, *cells))
    what = {wording.inline(c.name) for c in found}
    headings = [
        f"{wording.printable(n)}{'' if len(what) == 1 else f' ({c.name})'}" for n, c in columns.items()
    ]
    note = (
        "Bold: may be the best of its column, with 95 % confidence, as in the comparison of that column alone."
        + (f" Numbers are {what.pop()}." if len(what) == 1 else "")
        + (" ± is the sample standard deviation over seeds." if any(len(c.seeds) > 1 for c in found) else "")
    )
    if rank:
        note += (
            f" Average rank: 1 is the best of the {wording.count(len(averages), 'method')} that {'is' if len(averages) == 1 else 'are'} in every "
            "column; equals share the mean of their ranks. It says nothing of chance."
        )
    shown = ("method", *headings, *([RANK] if rank else []))
    return TextTable(shown, tuple(rows), "", note, bold=frozenset(bold))


def plain_side_by_side(columns: Mapping[str, Compared]) -> list[dict[str, Any]]:
    """Return a line for each method and comparison as plain values, for a CSV file."""
    averages, rows = average_ranks(list(columns.values())), []
    common = list(averages)
    for name, c in columns.items():
        sign = -1 if c.metric == "loss" else 1
        known = [c.standings[c.labels.index(n)].mean for n in common]
        place = dict(zip(common, ranks(known), strict=True))
        for label, s in zip(c.labels, c.standings, strict=True):
            mean, std = mean_std(sign * v for v in s.by_seed)
            rows.append(
                {
                    "column": name,
                    "method": label,
                    "metric": c.kind.loss_name if c.metric == "loss" else c.metric,
                    "mean": mean,
                    "std": std,
                    "users": c.users,
                    "seeds": len(c.seeds),
                    "bold": "yes" if s.close else "no" if s.told_apart else "",
                    "rank": place.get(label),
                    "average_rank": averages.get(label),
                }
            )
    return rows


def by_group(c: Compared, group: Mapping[str, str]) -> dict[str, Compared]:
    """Return the comparison of each group's users alone, the largest group first.

    Args:
        c: the comparison of all users, by a metric that is a mean over users.
        group: of users that have one, by id.
    """
    users = enumerate(c.models[0].clients)
    places = by_key((group[user], place) for place, user in users if user in group)
    found = {}
    for name, own in sorted(places.items(), key=lambda one: (-len(one[1]), one[0])):
        models = tuple(model.only(np.array(own)) for model in c.models)
        key = f"{name} ({wording.count(len(own), 'user')})"
        found[key] = replace(c, standings=tuple(standings(models)), users=len(own), models=models)
    return found


def by_data(found: Mapping[str, FoundComparison]) -> dict[str, Compared]:
    """Return every data set's comparison by its name; of one with several tasks each task's."""
    return {
        f"{name}, {wording.printable(c.task)}" if c.task else name: c
        for name, one in found.items()
        for c in one.compared
    }


def write_across(found: Mapping[str, FoundComparison], folder: Path) -> Path:
    """Write a page, and ``tables/data-sets``, about comparisons of several data sets; return the page's path.

    Args:
        found: by the data set's name, which is its folder's in ``folder`` too.
        folder: where to.
    """
    columns = by_data(found)
    published = {label: name for one in found.values() for label, name in one.published.items()}
    table, rows = side_by_side(columns), plain_side_by_side(columns)
    write_table(folder / "tables", "data-sets", table, rows, in_paper(table, published))
    write_document(folder / "tables")
    first = next(iter(columns.values()))
    lead = " · ".join(
        (
            wording.count(len(found), "data set"),
            wording.count(len(table.rows), "method"),
            wording.count(len(first.seeds), "seed"),
        )
    )
    pages = TextTable(
        ("data set", "users", "page"),
        tuple((n, str(one.compared[0].users), f"{n}/report.html") for n, one in found.items()),
        left=3,
    )
    notes = [
        Text(f"{name}: {note}", warning=True)
        for name, one in found.items()
        for note in (*one.notes, *unlike(one))
    ]
    best = [Text(f"{name}: {said(c)}") for name, c in columns.items()]
    sections = (
        Section("comparison", "All data sets", (*notes, table, *best)),
        Section("data", "Each data set", (pages,)),
    )
    title = f"{wording.count(len(table.rows), 'method')} on {wording.count(len(found), 'data set')}"
    return write_content(Content(title, lead, (), sections, tuple(rows)), folder / "report.html")
