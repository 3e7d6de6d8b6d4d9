"""Several methods in one table, as a page, and as tables and figures for papers.

Bold: a method that may be the best; not just the largest number.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.files import write_whole
from fedkeep.metrics import CLASS_METRICS
from fedkeep.metrics.worth.best import Standing, level, standings
from fedkeep.metrics.worth.gains import FEW, Paired
from fedkeep.report import facts, measured, pairing, wording
from fedkeep.report.blocks import Block, Content, Figure, Section, Text
from fedkeep.report.charts import VERDICTS, Rank, Ranks
from fedkeep.report.groups import Configuration, Scene, main_metrics
from fedkeep.report.page import write_content
from fedkeep.report.pairing import MUST_BEAT, Side, own_side, reference_side
from fedkeep.report.text_tables import TextTable, latex_escape, mean_std, to_csv, to_latex, to_markdown
from fedkeep.report.worth_page import (
    NO_SUBJECT,
    Comparison,
    asked,
    compare,
    comparisons,
    counted,
    fairness_table,
    few,
    limits,
    pooled_table,
    unit_of,
    worth_table,
    write_gain,
)
from fedkeep.tasks import KINDS, Kind

if TYPE_CHECKING:
    import pyarrow as pa


_NEEDS = {kind.counting.name: kind.counting.needs for kind in KINDS.values() if kind.counting is not None}
"""What counting does without, by its name."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Methods on the same test examples, for one task.

    Attributes:
        task: the task's name; None where the data have one.
        kind: the kind of the task.
        metric: ``accuracy``, of a ranking ``hr10``, ``loss``, or one of ``CLASS_METRICS``, over all examples.
        unit: what differences are counted in, see ``Comparison``.
        labels: the methods' names.
        standings: where each stands.
        users: how many.
        seeds: that each was run with.
        models: each method's results, as ``pairing.pair`` returns them.
    """

    task: str | None
    kind: Kind
    metric: str
    unit: str
    labels: tuple[str, ...]
    standings: tuple[Standing, ...]
    users: int
    seeds: tuple[int, ...]
    models: tuple[Paired, ...] = field(default=(), repr=False, compare=False)

    @property
    def best(self) -> int:
        """The place of the best."""
        return next(i for i, s in enumerate(self.standings) if s.is_best)

    @property
    def level(self) -> str:
        """The level of each interval, e.g. ``99.8 %``."""
        return f"{100 * level(len(self.labels)):.4g} %"

    @property
    def name(self) -> str:
        """The metric's name for people."""
        what = self.kind.loss_words if self.metric == "loss" else wording.metric_name(self.metric)
        over = "over all examples" if self.metric in CLASS_METRICS else "mean over users"
        return f"{what}, {over}" + (f", {wording.printable(self.task)}" if self.task else "")

    def value(self, s: Standing) -> str:
        """Write a method's mean, with the deviation over seeds where there are several."""
        sign = -1 if self.metric == "loss" else 1  # losses were turned round
        mean, std = mean_std(sign * v for v in s.by_seed)
        return wording.spread(mean, std, self.metric)

    def gap(self, value: float) -> str:
        """Write a difference without its unit."""
        return write_gain(self.unit, value)

    def distance(self, s: Standing) -> float:
        """Return a method's mean less the best one's."""
        return s.mean - self.standings[self.best].mean

    @property
    def untested(self) -> str:
        """Say which methods were not tested against the best, and why; empty where all were."""
        names = [
            n for n, s in zip(self.labels, self.standings, strict=True) if not s.close and not s.told_apart
        ]
        why = "all users differ alike"
        if self.users < FEW:
            why = "some users have one test example, or all examples of a user differ alike"
        return f" Not tested against the best, as {why}: {', '.join(names)}." if names else ""

    def behind(self, s: Standing) -> str:
        """Write how far a method is behind the best, with its interval."""
        if s.is_best:
            return "best"
        if s.behind is None:
            return f"{self.gap(self.distance(s))} ({wording.MISSING})"
        return f"{self.gap(s.behind.mean)} ({self.gap(s.behind.low)} to {self.gap(s.behind.high)})"


def compared(sides: Sequence[Side], metric: str | None = None) -> Iterator[Compared]:
    """Yield the comparison of all sides for each task.

    Args:
        sides: methods' models, on the same data, with the same seeds.
        metric: as of ``pairing.pair``; None: accuracy, for a regression the loss.

    Raises:
        ConfigError: data, seeds or test examples differ, or models can't be compared by the metric.
    """
    if len(sides) < 2:
        raise ConfigError(
            "A comparison wants two methods at least; got {methods}.",
            methods=", ".join(s.label for s in sides) or "none",
        )
    examples = pairing.kept(sides[0].runs[0])
    for task in examples.tasks:
        kind = examples(sides[0].model, task).kind
        by = metric or kind.compared_by
        models = [pairing.pair(side, sides[0], task, by) for side in sides]
        yield Compared(
            task=task,
            kind=kind,
            metric=counted(by, kind),
            unit=unit_of(by, kind),
            labels=tuple(side.label for side in sides),
            standings=tuple(standings(models)),
            users=len(models[0].clients),
            seeds=models[0].seeds,
            models=tuple(models),
        )


def against_references(
    sides: Sequence[Side], references: Sequence[Side], metric: str | None = None
) -> list[Comparison]:
    """Return each method against the shared part alone, where its runs keep that, and against every other reference.

    FedAvg, a reference itself, is compared with those that need no federation.

    Raises:
        ConfigError: one can't be compared; says why.
    """
    found: list[Comparison] = []
    for side in sides:
        others = sorted((r for r in references if r.runs != side.runs), key=asked)
        if side.runs[0].method in NO_SUBJECT:
            found += [c for r in others if r.reference in MUST_BEAT for c in compare(side, r, metric)]
            continue
        more, faults = comparisons(side, others, metric)
        if references and faults:
            raise ConfigError(faults[0])
        found += more
    return found


def said(c: Compared) -> str:
    """Return in words which method is the best, and which do not differ significantly from it."""
    best = c.standings[c.best]
    close = [n for n, s in zip(c.labels, c.standings, strict=True) if s.close and not s.is_best]
    apart = sum(s.told_apart for s in c.standings)
    whom = "users like these" if c.users >= FEW else "these users"
    words = f"Best: {c.labels[c.best]}, {c.value(best)} ({wording.inline(c.name)})."
    if close:
        words += f" Not distinguishable from it: {', '.join(close)}."
    if apart:
        words += f" {apart} of the others {'is' if apart == 1 else 'are'} worse than the best for {whom}."
    return words + c.untested


def not_beating(found: Sequence[Comparison]) -> Iterator[str]:
    """Yield for each reference that needs no federation, counting and local training, which methods don't beat it."""
    for theirs, task in dict.fromkeys((c.theirs, c.task) for c in found if c.reference in MUST_BEAT):
        own = [c for c in found if (c.theirs, c.task) == (theirs, task) and not c.found.helps]
        worse = [c for c in own if c.found.headline is not None and c.found.headline.high < 0]
        unknown = [c for c in own if c.found.headline is None]
        unsure = [c for c in own if c not in worse and c not in unknown]
        where = f", {wording.printable(task)}" if task else ""
        parts = (
            (worse, "Worse than it, as the whole 95 % interval lies below 0"),
            (unsure, "Not better for certain, as the 95 % interval holds 0"),
            (unknown, "Not tested, as no interval is known"),
        )
        words = [
            f"{why}: {', '.join(f'{c.ours} {c.interval(c.headline, unit=False)}' for c in some)}."
            for some, why in parts
            if some
        ]
        if words:
            all_of = sum((c.theirs, c.task) == (theirs, task) for c in found)
            which = f"{len(own)} of {wording.count(all_of, 'method')} {'does' if len(own) == 1 else 'do'}"
            what = _NEEDS.get(theirs, "needs no federation")
            yield f"{which} not beat {theirs}{where}, which {what}. {' '.join(words)}"


def beating(found: Sequence[Comparison]) -> str:
    """Say which methods beat all that needs no federation, by name; empty where one does not, or none was compared."""
    tested = [c for c in found if c.reference in MUST_BEAT]
    if not tested or not all(c.found.helps for c in tested):
        return ""
    ours, theirs = (
        list(dict.fromkeys(names)) for names in zip(*((c.ours, c.theirs) for c in tested), strict=True)
    )
    verb = "beats" if len(ours) == 1 else "beat"
    return f"{_listed(ours)} {verb} {_listed(theirs)}: all 95 % intervals lie above 0."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def table(c: Compared, facts: Sequence[Sequence[str]] = (), names: Sequence[str] = ()) -> TextTable:
    """Return a line for each method; its mean is bold where it may be the best.

    Args:
        c: the comparison.
        facts: of each method, further cells.
        names: their headings.
    """
    rows = []
    for i, (label, s) in enumerate(zip(c.labels, c.standings, strict=True)):
        more = facts[i] if facts else ()
        rows.append((label, c.value(s), c.behind(s), "" if s.is_best else p_text(s.p), *more))
    bold = frozenset((i, 1) for i, s in enumerate(c.standings) if s.close)
    whom = "users like these" if c.users >= FEW else "these users"
    pairs = len(c.labels) - 1
    note = "Bold: may be the best; between two of these nothing is decided."
    if any(s.behind is not None for s in c.standings if not s.is_best):
        note += (
            " Each other method is compared with the best on the same users, examples and seeds. In brackets is where its "
            f"difference lies, for {whom}; it may be the best if 0 lies there."
        )
        if pairs > 1:
            note += f" Each is a {c.level} interval, so that with 95 % confidence all {pairs} hold; p was multiplied by {pairs}."
    note += f" {_counts(c.metric)}.{f' {wording.BY_FIRST_TASK}' if c.task else ''}{c.untested}"
    if len(c.seeds) > 1:
        note += f" ± is the sample standard deviation over {len(c.seeds)} seeds."
    columns = ("method", c.name, f"difference to the best ({c.unit})", "p (corrected)", *names)
    return TextTable(columns, tuple(rows), "", note, bold=bold)


def _counts(metric: str) -> str:
    if metric in CLASS_METRICS:
        return "Every example counts once, and users are left out one at a time (jackknife)"
    return "Each user counts once"


def p_text(p: float) -> str:
    """Write a p-value with two digits; a very small one as ``< 0.001``."""
    if math.isnan(p):
        return wording.MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def plain_rows(c: Compared) -> list[dict[str, Any]]:
    """Return a line for each method as plain values, for a CSV file: fractions, nats or squared error."""
    sign = -1 if c.metric == "loss" else 1
    rows = []
    for label, s in zip(c.labels, c.standings, strict=True):
        mean, std = mean_std(sign * v for v in s.by_seed)
        gap, tested = s.behind, s.close or s.told_apart
        rows.append(
            {
                "method": label,
                "task": c.task,
                "metric": c.kind.loss_name if c.metric == "loss" else c.metric,
                "mean": mean,
                "std": std,
                "users": c.users,
                "seeds": len(c.seeds),
                "gain_to_best": c.distance(s),
                "low": None if gap is None else gap.low,
                "high": None if gap is None else gap.high,
                "p_corrected": s.p if tested and not s.is_best else None,
                "bold": "yes" if s.close else "no" if tested else "",
            }
            | {f"seed_{seed}": sign * v for seed, v in zip(c.seeds, s.by_seed, strict=True)}
        )
    return rows


def ranks_figure(c: Compared) -> Figure:
    """Return methods from best to worst, by their distance to the best."""
    ranks, data = [], []
    for label, s in sorted(zip(c.labels, c.standings, strict=True), key=lambda one: -one[1].mean):
        gap, near, mean = s.behind, s.close, c.distance(s)
        low, high = (None, None) if gap is None else (gap.low, gap.high)
        tip = "\n".join(
            [label, c.value(s), c.behind(s), *([] if s.is_best else [f"p {p_text(s.p)} (corrected)"])]
        )
        ranks.append(Rank(label, c.value(s), mean, low, high, "o", near, "0" if near else "x", tip))
        data.append(
            {
                "method": label,
                "gain": mean,
                "low": low,
                "high": high,
                "told_apart": None if math.isnan(s.p) else s.told_apart,
            }
        )
    chart = Ranks(
        tuple(ranks),
        f"difference to the best ({c.unit}), {c.level} intervals",
        c.gap,
        "best",
    )
    caption = (
        "Filled marks and bold names: may be the best, as the interval holds 0. Intervals are paired: both methods see the "
        "same examples and seeds. Their level is that of one among all comparisons with the best; "
        f"a method whose results vary more may be bold with a smaller mean.{c.untested}"
    )
    title = f"{c.name}: distance to the best"
    return Figure(title, (chart,), caption, table=table(c), data=data)


def gains_figures(found: Sequence[Comparison]) -> Iterator[Figure]:
    """Yield for each reference what methods gain over it."""
    for theirs, task in dict.fromkeys((c.theirs, c.task) for c in found):
        own = [c for c in found if (c.theirs, c.task) == (theirs, task) and c.found.headline is not None]
        ranks, data = [], []
        for c in sorted(own, key=lambda c: -c.found.headline.mean if c.found.headline else 0.0):
            i = c.found.headline
            assert i is not None
            way = "better" if i.low > 0 else "worse" if i.high < 0 else ""
            slot, shape = VERDICTS[way]
            text = f"{c.write(i.mean)} ({c.write(i.low)} to {c.write(i.high)})"
            ranks.append(
                Rank(
                    c.ours, text, i.mean, i.low, i.high, shape, bool(way), slot, f"{c.ours}\n{c.interval(i)}"
                )
            )
            data.append({"method": c.ours, "gain": i.mean, "low": i.low, "high": i.high})
        if ranks:
            write = partial(write_gain, own[0].unit)
            tail = f", {wording.printable(task)}" if task else ""
            chart = Ranks(tuple(ranks), f"gain ({own[0].unit}), 95 % intervals", write, theirs)
            caption = "Triangles: the whole 95 % interval lies on one side of 0. Grey circles: it holds 0."
            yield Figure(f"Gain over {theirs}{tail}", (chart,), caption, data=data)


def gains_table(found: Sequence[Comparison]) -> TextTable:
    """Return what each method gains over each reference: a line a method, a column a reference."""
    units = list(dict.fromkeys(c.unit for c in found))
    theirs = list(dict.fromkeys(c.theirs for c in found))
    rows, bold = [], set()
    for i, (ours, task) in enumerate(dict.fromkeys((c.ours, c.task) for c in found)):
        by = {c.theirs: c for c in found if (c.ours, c.task) == (ours, task)}
        cells = [
            by[t].interval(by[t].headline, unit=len(units) > 1) if t in by else wording.MISSING
            for t in theirs
        ]
        bold |= {(i, j) for j, t in enumerate(theirs, 1) if t in by and by[t].found.helps}
        rows.append((ours + (f", {wording.printable(task)}" if task else ""), *cells))
    tail = f" ({units[0]})" if len(units) == 1 else ""
    note = "Gains in the mean over users, with 95 % intervals. Bold: the whole interval lies above 0."
    if any(c.metric in CLASS_METRICS for c in found):
        note = note.replace(
            "the mean over users", f"{wording.metric_inline(found[0].metric)} over all examples"
        )
    columns = ("method", *(f"gain over {t}{tail}" for t in theirs))
    return TextTable(columns, tuple(rows), "", note, bold=frozenset(bold))


def plain_gains(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return a line for each method and reference as plain values, for a CSV file."""
    rows = []
    for c in found:
        i, w = c.found.headline, c.found
        told: dict[str, int | None] = {
            "at_least_better": w.at_least_better,
            "at_least_worse": w.at_least_worse,
            "better": w.count("better"),
            "worse": w.count("worse"),
        }
        if c.metric in CLASS_METRICS:
            told = dict.fromkeys(told)
        rows.append(
            {
                "method": c.ours,
                "against": c.theirs,
                "task": c.task,
                "metric": c.metric,
                "unit": c.unit,
                "gain": c.headline.mean,
                "low": None if i is None else i.low,
                "high": None if i is None else i.high,
                "helps": "yes" if w.helps else "no",
                "users": len(w.clients),
                "seeds": len(w.seeds),
                **told,
            }
        )
    return rows


FACTS = (1, 2, 3, 7)  # of the table of traffic: down, up, private, time
REFERENCE = ("local", "fine_tuned", "fedavg")


@dataclass(frozen=True, kw_only=True)
class FoundComparison:
    """A comparison that is to be shown.

    Attributes:
        title: the page's heading.
        groups: methods, each with all its seeds.
        compared: of each task how they stand; references that learn nothing are in it too.
        gains: each federated method against its references; empty where these are not wanted.
        notes: what a reader must know, e.g. of methods that diverged.
        how: how methods came to their settings.
        chosen: by method, what its trials gave; none: there were no trials.
        published: names of methods for papers, by their labels.
        further: more tables of methods, each with its rows as plain values, by the name of their files.
        ranking: such a table of how they rank all items; None: it was not asked for.
    """

    title: str
    groups: tuple[Configuration, ...]
    compared: tuple[Compared, ...]
    gains: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    how: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, tuple[TextTable, list[dict[str, Any]]]] = field(default_factory=dict)
    ranking: tuple[TextTable, list[dict[str, Any]]] | None = None

    def clients_frame(self) -> pa.Table:
        """Return a row for each method, seed, user and task, as a table of pyarrow; ``.to_pandas()`` makes a data frame.

        Columns: method, seed, client, task (null where the data have one), metric, value (the mean over the user's test
        examples; of a metric over all examples the user's share in it) and examples.
        """
        import pyarrow as pa

        columns: dict[str, list[Any]] = {}
        for c in self.compared:
            sign = -1 if c.metric == "loss" else 1
            for label, model in zip(c.labels, c.models, strict=True):
                values = sign * model.means(model.ours.astype(np.float64))
                for seed, own in zip(model.seeds, values, strict=True):
                    rows = {
                        "method": [label] * c.users,
                        "seed": [seed] * c.users,
                        "client": model.clients,
                        "task": [c.task] * c.users,
                        "metric": [c.kind.loss_name if c.metric == "loss" else c.metric] * c.users,
                        "value": own.tolist(),
                        "examples": model.examples.tolist(),
                    }
                    for name, cells in rows.items():
                        columns.setdefault(name, []).extend(cells)
        types = {"seed": pa.int64(), "value": pa.float64(), "examples": pa.int64()}
        return pa.table(columns, pa.schema([(name, types.get(name, pa.string())) for name in columns]))

    def table(self, c: Compared) -> TextTable:
        """Return a line for each method, with the settings that were chosen for it."""
        facts = [[self.chosen.get(label, wording.MISSING)] for label in c.labels] if self.chosen else []
        return table(c, facts, ["chosen on valid"] if facts else [])


def find(
    title: str,
    groups: Sequence[Configuration],
    counting: Side | None = None,
    metric: str | None = None,
    *,
    references: bool = True,
    notes: Sequence[str] = (),
    how: str = "",
) -> FoundComparison:
    """Compare finished runs.

    Args:
        title, notes, how: as of ``FoundComparison``.
        groups: methods, each with all its seeds.
        counting: counting as a method of its own.
        metric: as of ``pairing.pair``; None: accuracy, for a regression the loss.
        references: whether each method is compared with references too: those among the groups, and counting.

    Raises:
        ConfigError: data, seeds or test examples differ, or models can't be compared by the metric.
    """
    own = [own_side(g) for g in groups]
    counted = [counting] if counting else []
    known = [reference_side(g) for g in groups if g.runs[0].method in REFERENCE and not g.centralised]
    federated = [own_side(g) for g in groups if g.runs[0].method != "local" and not g.centralised]
    return FoundComparison(
        title=title,
        groups=tuple(groups),
        compared=tuple(compared([*own, *counted], metric)),
        gains=tuple(against_references(federated, [*known, *counted], metric)) if references else (),
        notes=tuple(notes),
        how=how,
        ranking=ranking_table(groups),
    )


def content(found: FoundComparison) -> Content:
    """Return the page's content."""
    groups, metrics = found.groups, main_metrics([run for g in found.groups for run in g.runs])
    told = [c for c in found.gains if c.metric not in CLASS_METRICS]
    every = measured.runs_table([Scene("", groups, tuple(metrics))])
    sections = [
        Section("comparison", "Comparison", tuple(_comparison(found))),
        Section(
            "ranking", "All items ranked", (replace(found.ranking[0], title=""),) if found.ranking else ()
        ),
        Section("groups", "Groups of users", tuple(shown for shown, _ in found.further.values())),
        Section("references", "Against the references", tuple(_references(found))),
        Section("curves", "Learning curves", (*measured.curves(groups, metrics), *_adapting(groups))),
        Section("worth", "Who gains, who loses", tuple(_worth(told)), folded=True),
        Section(
            "users", "Spread over users", (*measured.users(groups, metrics), *_adapting(groups)), folded=True
        ),
        Section("traffic", "Traffic and time", tuple(facts.traffic(groups))),
        Section("runs", "Every run", (every, *_adapting(groups)), folded=True),
        Section("split", "What is federated, what is private", tuple(facts.split(groups)), folded=True),
        Section("data", "Data", (*facts.partitions(groups), *facts.table_of(groups, "data"))),
        Section("configuration", "Configuration", tuple(facts.configuration(groups)), folded=True),
        Section("environment", "Environment", tuple(facts.table_of(groups, "environment")), folded=True),
    ]
    first = found.compared[0]
    lead = " · ".join(
        (
            wording.count(len(groups), "method"),
            wording.count(len(first.seeds), "seed"),
            wording.count(first.users, "user"),
            f"data {wording.printable(groups[0].runs[0].data_name)}",
        )
    )
    summary = tuple(row for c in found.compared for row in plain_rows(c))
    return Content(found.title, lead, (), tuple(s for s in sections if s.blocks), summary)


def write(found: FoundComparison, folder: Path) -> Path:
    """Write ``report.html`` (.md, .json), ``tables/`` and ``figures/`` into a folder; return the page's path."""
    from pyarrow import parquet

    from fedkeep.report.drawing import write_figure

    made = content(found)
    figures: dict[str, Figure] = {}
    for c in found.compared:
        tail = _file_name(c.task)
        write_table(
            folder / "tables",
            f"comparison{tail}",
            _table(found, c),
            plain_rows(c),
            in_paper(table(c), found.published),
        )
        figures[f"comparison{tail}"] = ranks_figure(c)
    if found.gains:
        gains = gains_table(found.gains)
        rows = plain_gains(found.gains)
        write_table(folder / "tables", "gains", gains, rows, in_paper(gains, found.published))
        for i, figure in enumerate(gains_figures(found.gains), 1):
            figures[f"gains-{i}{_file_name(figure.title.removeprefix('Gain over '))}"] = figure
    costs = _costs(found)
    plain = [dict(zip(costs.columns, row, strict=True)) for row in costs.rows]
    write_table(folder / "tables", "costs", costs, plain, in_paper(costs, found.published))
    more = {"ranking": found.ranking} if found.ranking else {}
    for name, (shown, rows) in (more | dict(found.further)).items():
        write_table(folder / "tables", name, shown, rows, in_paper(shown, found.published))
    write_document(folder / "tables")
    sink = io.BytesIO()
    parquet.write_table(found.clients_frame(), sink)
    write_whole(folder / "tables" / "clients.parquet", sink.getvalue())
    curves = [b for s in made.sections if s.key == "curves" for b in s.blocks]
    figures |= {f"curves-{i}": b for i, b in enumerate(curves, 1) if isinstance(b, Figure)}
    for name, figure in figures.items():
        write_figure(figure, folder / "figures", name)
    return write_content(made, folder / "report.html")


def write_table(
    folder: Path,
    name: str,
    table: TextTable,
    rows: Sequence[Mapping[str, Any]],
    paper: TextTable | None = None,
) -> None:
    """Write a table of methods as ``NAME.md``, ``NAME.tex`` and ``NAME.csv``.

    Args:
        folder: where to; it is made.
        name: the files'.
        table: a line a method.
        rows: the same as plain values, for the CSV file.
        paper: what the LaTeX file holds; by default the table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in (
        ("md", to_markdown(table)),
        ("tex", to_latex(paper or table)),
        ("csv", to_csv(rows)),
    ):
        write_whole(folder / f"{name}.{suffix}", text.encode())


def in_paper(table: TextTable, published: Mapping[str, str]) -> TextTable:
    """Return a table of methods with the names under which they were published, as far as these are known."""
    rows = tuple((published.get(label, label), *cells) for label, *cells in table.rows)
    return replace(table, rows=rows)


def write_document(folder: Path) -> None:
    """Write ``all.tex``, a paper of two columns that holds every table of the folder; it shows what they want."""
    names = sorted(path.stem for path in folder.glob("*.tex") if path.name != "all.tex")
    lines = [r"\documentclass[twocolumn]{article}", r"\usepackage{booktabs,graphicx}", r"\begin{document}"]
    lines += [
        rf"\begin{{table}}\centering\caption{{{latex_escape(name)}}}\input{{{name}}}\end{{table}}"
        for name in names
    ]
    write_whole(folder / "all.tex", "\n".join([*lines, r"\end{document}", ""]).encode())


def _file_name(text: str | None) -> str:
    words = "".join(c if c.isalnum() and c.isascii() else " " for c in (text or "").lower()).split()
    return "".join(f"-{word}" for word in words)[:60]


def _costs(found: FoundComparison) -> TextTable:
    """Return what each method's runs took, and the settings that were chosen for it."""
    (traffic,) = facts.traffic(found.groups)
    assert isinstance(traffic, TextTable)
    columns = ("method", *(traffic.columns[i] for i in FACTS))
    rows = [(row[0], *(row[i] for i in FACTS)) for row in traffic.rows]
    if found.chosen:
        columns += ("chosen on valid",)
        rows = [(*row, found.chosen.get(row[0], wording.MISSING)) for row in rows]
    return TextTable(columns, tuple(rows), note=traffic.note)


def _table(found: FoundComparison, c: Compared) -> TextTable:
    costs = _costs(found)
    by_label = {label: more for label, *more in costs.rows}
    none = [wording.MISSING] * (len(costs.columns) - 1)
    return table(c, [by_label.get(label, none) for label in c.labels], costs.columns[1:])


def _adapting(groups: Sequence[Configuration]) -> list[Block]:
    later = [g.label for g in groups if own_side(g).model == "adapted"]
    return [Text(f"Before they adapt, unlike in the comparison: {', '.join(later)}.")] if later else []


def _comparison(found: FoundComparison) -> list[Block]:
    notes = [*found.notes, *facts.attendance(found.groups)]
    out: list[Block] = [Text(note, warning=True) for note in notes]
    for c in found.compared:
        out += [Text(said(c)), _table(found, c), ranks_figure(c)]
    first = found.compared[0]
    lines = [*few(first.users, len(first.seeds)), *([found.how] if found.how else []), *unlike(found)]
    return [*out, Text(" ".join(lines))] if lines else out


def unlike(found: FoundComparison) -> Iterator[str]:
    """Say where methods were not treated alike: unequal local steps, and clients that no round drew."""
    if work := facts.unequal_work(found.groups):
        yield work
    yield from facts.never_drawn(found.groups)


def _references(found: FoundComparison) -> list[Block]:
    if not found.gains:
        return []
    out: list[Block] = [Text(line, warning=True) for line in not_beating(found.gains)]
    if said := beating(found.gains):
        out.append(Text(said))
    return [*out, gains_table(found.gains), *gains_figures(found.gains)]


def _worth(gains: Sequence[Comparison]) -> list[Block]:
    if not gains:
        return []
    said = dict.fromkeys(line for c in gains for line in limits(c.found))
    out: list[Block] = [Text(" ".join(said))] if said else []
    out += [worth_table(gains), fairness_table(gains)]
    return [*out, pooled_table(gains)] if any(c.pooled for c in gains) else out


RANKING = "ranking"
Rows = list[dict[str, Any]]


def ranking_table(groups: Sequence[Configuration]) -> tuple[TextTable, Rows] | None:
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
    return TextTable(heads, shown, wording.printable(first["title"]), note), rows


def _of(analysis: Mapping[str, Any], column: int) -> dict[str, float]:
    return {row[0]: row[column] for row in analysis["rows"]}
