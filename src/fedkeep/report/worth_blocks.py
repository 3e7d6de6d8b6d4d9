"""The section of a page on what personalisation was worth: sentences, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.metrics.worth import Group, Interval
from fedkeep.metrics.worth.gains import FEW
from fedkeep.report import wording
from fedkeep.report.blocks import Block, Figure, Text
from fedkeep.report.charts import GAINS_LEGEND, Chart, Gainer, Gains, Lines, Series
from fedkeep.report.groups import Configuration
from fedkeep.report.pairing import own_side
from fedkeep.report.tables import Table
from fedkeep.report.worth import Comparison, comparisons, limits, plain, recognised, sentences, subjects

SAID = {"better": "better off", "worse": "worse off", "": "can't be told"}
MOST_NAMED = 200  # users listed in a table


def table(found: Sequence[Comparison], title: str = "") -> Table:
    """Return a line for each comparison."""
    units = list(dict.fromkeys(c.unit for c in found))
    several, tail = len(units) > 1, f" ({units[0]})" if len(units) == 1 else ""
    rows = []
    for c in found:
        w, people = c.found, len(c.found.clients)
        rows.append(
            (
                c.ours,
                c.against,
                *([c.unit] if several else []),
                c.interval(w.like_these if people >= FEW else None, unit=False),
                c.interval(w.these, unit=False),
                *(f"{math.floor(100 * n / people)} %" for n in (w.at_least_better, w.at_least_worse)),
                *(f"{w.count(verdict):,}" for verdict in ("better", "worse")),
                c.interval(w.worst.gain if w.worst else None, unit=False),
                f"{len(w.seeds)}",
            )
        )
    columns = (
        "model",
        "against",
        *(["unit"] if several else []),
        f"gain, users like these{tail}",
        f"gain, these users{tail}",
        "at least gain",
        "at least lose",
        "better off",
        "worse off",
        f"gain of the tenth that gained least on validation{tail}",
        "seeds",
    )
    note = (
        "Each user counts once. Intervals are 95 %. Users are named better or worse off by exact paired tests, so "
        "that of those named about 5 % at most are named wrongly."
    )
    if any(c.task for c in found):
        note += f" {wording.BY_FIRST_TASK}"
    if any(c.metric == "hr10" for c in found):
        note += " Of a ranking gains are in HR@10: the right item is among the first ten or not."
    return Table(columns, tuple(rows), title, note, left=3 if several else 2)


def pooled_table(found: Sequence[Comparison]) -> Table:
    """Return gains in numbers that pool all examples, a line each."""
    rows = []
    for c in found:
        for metric, i in c.pooled:
            ends = f"{wording.difference(i.low, metric)} to {wording.difference(i.high, metric)}"
            known = ends if np.isfinite([i.low, i.high]).all() else wording.MISSING  # it hangs on one user
            rows.append(
                (c.ours, c.against, wording.metric_name(metric), wording.difference(i.mean, metric), known)
            )
        if c.aucs is not None and not np.isnan(c.aucs).all():
            gain, able = float(np.nanmean(c.aucs[0] - c.aucs[1])), int((~np.isnan(c.aucs[0])).sum())
            name = f"AUC of a user, mean of {wording.count(able, 'user')} with five examples of either class"
            rows.append((c.ours, c.against, name, wording.difference(gain, "auc"), "not tested"))
    note = (
        "Every example counts once. Positive is better. Intervals leave out one user at a time (jackknife)."
    )
    columns = ("model", "against", "metric over all examples", "gain", "95 % interval")
    return Table(columns, tuple(rows), "", note, left=3)


def examples_table(found: Sequence[Comparison]) -> Table:
    """Return the gain of each quarter of users by number of training examples."""
    rows = [
        (
            c.ours,
            c.against,
            _range(g),
            f"{g.clients:,}",
            c.interval(g.gain),
            "users like these" if g.alike else "these users",
        )
        for c in found
        for g in c.found.by_examples
    ]
    return Table(("model", "against", "training examples", "users", "gain", "for"), tuple(rows), left=2)


def told_table(found: Sequence[Comparison]) -> Table:
    """Return the users who are named, those who lose first; of more than `MOST_NAMED` the least and greatest gains."""
    told = [(c, k) for c in found for k, verdict in enumerate(c.found.verdicts) if verdict]
    told.sort(key=lambda one: float(one[0].found.gain[one[1]]))
    half = MOST_NAMED // 2
    shown = told if len(told) <= MOST_NAMED else told[:half] + told[-half:]
    rows = [
        (
            wording.printable(c.found.clients[k]),
            c.against,
            SAID[c.found.verdicts[k]],
            c.interval(Interval(float(c.found.gain[k]), *c.found.spans[k].tolist())),
            f"{c.found.examples[k]:,}",
        )
        for c, k in shown
    ]
    note = "" if len(shown) == len(told) else f"Of {len(told):,} users the {half} at either end."
    columns = ("user", "against", "named", "gain", "test examples")
    return Table(columns, tuple(rows), "", note, left=3)


def fairness_table(found: Sequence[Comparison]) -> Table:
    """Return how unequal users are under either model."""
    rows = []
    for c in found:
        f, name = c.found.fairness, "" if c.metric == "loss" else c.metric
        sign = -1 if c.metric == "loss" else 1  # losses were turned round
        cells = [wording.number(v, name) for v in f.deviation] + [
            wording.number(sign * v, name) for v in f.lowest
        ]
        off = c.found.worst_off
        rows.append((c.ours, c.against, *cells, c.interval(off.gain if off else None)))
    columns = (
        "model",
        "against",
        "deviation between users, reference",
        "model's",
        "worst tenth begins at, reference",
        "model's",
        "gain of the tenth worst off on validation",
    )
    note = (
        "Deviations and tenths are of users' results on test; with few test examples much of them is chance. A "
        "tenth of users has a worse result than where it begins. The last column chooses users on validation, by the "
        "reference's result."
    )
    return Table(columns, tuple(rows), "", note, left=2)


def blocks(groups: Sequence[Configuration]) -> Iterator[Block]:
    """Yield what the personalised models among configurations were worth: sentences, tables, figures.

    What can't be compared is said in a warning.
    """
    if not any(run.examples for g in groups for run in g.runs):
        return
    found: list[Comparison] = []
    for group in subjects(groups):
        references, faults = recognised(group, groups)
        try:
            more, not_made = comparisons(own_side(group), references)
        except ConfigError as error:
            more, not_made = [], [str(error)]
        found += more
        faults += [fault for fault in not_made if fault not in faults]
        yield from (Text(text, warning=True) for text in faults)
    for c in found:
        yield Text(f"{c.title}: {' '.join(sentences(c))}")
    if said := dict.fromkeys(line for c in found for line in limits(c.found)):
        yield Text(" ".join(said))
    if not found:
        return
    yield table(found)
    yield fairness_table(found)
    if any(c.pooled for c in found):
        yield pooled_table(found)
    for ours in dict.fromkeys(c.ours for c in found):
        yield from _figures([c for c in found if c.ours == ours], ours)


def _figures(found: Sequence[Comparison], title: str) -> Iterator[Block]:
    panels: list[Chart] = []
    data = []
    for c in found:
        users = tuple(_gainer(c, k) for k in range(len(c.found.clients)))
        i = c.found.headline
        mean = (i.mean, i.low, i.high) if i else None
        panels.append(Gains(f"against {c.against}", users, mean, c.write, f"Gain ({c.unit})"))
        data.append(plain(c))
    caption = "Each mark is a user, its line the user's own 95 % interval over test examples, cut at the axes' ends."
    yield Figure(
        f"Gain of each user: {title}",
        tuple(panels),
        caption,
        GAINS_LEGEND,
        None,
        told_table(found),
        data,
        columns=2,
    )
    panels = []
    for c in found:
        known = [(i, g.gain) for i, g in enumerate(c.found.by_examples) if g.gain is not None]
        if len(known) < 2:
            continue
        columns = zip(*((float(i), g.mean, g.low, g.high) for i, g in known), strict=True)
        x, y, low, high = (tuple(column) for column in columns)
        chart = Lines(
            series=(Series("", x, y, "0", False, low, high),),
            x_label="training examples of a user",
            y_label=f"Gain ({c.unit})",
            heading=f"against {c.against}",
            y_format=c.write,
            hover_x="training examples",
            x_names=tuple(_range(g) for g in c.found.by_examples),
            marks=True,
            references=((0.0, ""),),
        )
        panels.append(chart)
    if panels:
        caption = "Quarters of the users by number of training examples, with 95 % intervals."
        yield Figure(
            f"Gain by number of training examples: {title}",
            tuple(panels),
            caption,
            table=examples_table(found),
            columns=2,
        )


def _gainer(c: Comparison, k: int) -> Gainer:
    w = c.found
    (low, high), gain, verdict = w.spans[k].tolist(), float(w.gain[k]), w.verdicts[k]
    own = "" if math.isnan(low) else f" ({c.write(low)} to {c.write(high)})"
    count = wording.count(int(w.examples[k]), "test example")
    tip = [wording.printable(w.clients[k]), f"{c.write(gain)} {c.unit}{own}", count, SAID[verdict]]
    return Gainer(gain, low, high, verdict, "\n".join(tip))


def _range(g: Group) -> str:
    return f"{g.least:,}" if g.least == g.most else f"{g.least:,} to {g.most:,}"
