"""What personalisation was worth: comparisons of runs, in plain words, and as a page's tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.metrics import CLASS_METRICS
from fedkeep.metrics.worth.gains import FEW, WHOLE_METHOD, ClientGroup, Worth, worth
from fedkeep.metrics.worth.intervals import Interval
from fedkeep.report import pairing, wording
from fedkeep.report.blocks import Block, Figure, Text
from fedkeep.report.charts import GAINS_LEGEND, Chart, Curve, Gainer, Gains, Lines
from fedkeep.report.groups import Configuration
from fedkeep.report.pairing import REFERENCES, Side, own_side
from fedkeep.report.text_tables import TextTable
from fedkeep.tasks import Kind

NO_SUBJECT = ("fedavg", "local")  # methods that are references only


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """A personalised model against a reference.

    Attributes:
        ours, theirs: names for people.
        task: the task's name; None where the data have one.
        metric: ``accuracy``, of a ranking ``hr10``, ``loss``, or one of ``CLASS_METRICS``: no user is told apart by
            these.
        unit: what a gain is counted in: ``points``, ``nats`` or ``in squared error``.
        found: what it was worth.
        pooled: gains in numbers that pool all clients' examples, by metric.
        aucs: (2, K) each client's AUC, ours and theirs, NaN where it says too little; None unless the task is binary.
        reference: what ``theirs`` is, see ``Side``.
    """

    ours: str
    theirs: str
    task: str | None
    metric: str
    unit: str
    found: Worth
    pooled: tuple[tuple[str, Interval], ...] = ()
    aucs: np.ndarray[Any, Any] | None = None
    reference: str = ""

    @property
    def against(self) -> str:
        """The reference's name, and the task's where there are several."""
        return self.theirs + (f", {wording.printable(self.task)}" if self.task else "")

    @property
    def title(self) -> str:
        """Both names, and the task's where there are several."""
        return f"{self.ours} against {self.against}"

    @property
    def headline(self) -> Interval:
        """The gain to name first, and its interval; its ends are NaN where none is known."""
        return self.found.headline or Interval(float(self.found.gain.mean()), math.nan, math.nan)

    def write(self, value: float) -> str:
        """Write a gain without its unit: points with one decimal, other numbers with three digits."""
        return write_gain(self.unit, value)

    def interval(self, interval: Interval | None, unit: bool = True) -> str:
        """Write ``3.1 points (1.9 to 4.3)``, or without the unit; a dash where there is none, or its ends are NaN."""
        if interval is None:
            return wording.MISSING
        ends = wording.MISSING
        if not math.isnan(interval.low):
            ends = f"{self.write(interval.low)} to {self.write(interval.high)}"
        return f"{self.write(interval.mean)} {f'{self.unit} ' if unit else ''}({ends})"


def write_gain(unit: str, value: float) -> str:
    """Write a gain without its unit: points with one decimal, other numbers with three digits."""
    if unit != "points":
        return wording.plain(value)
    return wording.difference(value, "accuracy").removesuffix(" points").removeprefix("+")


def unit_of(metric: str, kind: Kind) -> str:
    """Return what gains in a metric are counted in, for a task of this kind."""
    return "points" if metric != "loss" else kind.loss_unit


def counted(metric: str, kind: Kind) -> str:
    """Return the name of what is compared by a metric of ``pairing.pair``, for a task of this kind."""
    return kind.right_name if metric == "accuracy" else metric


def compare(ours: Side, theirs: Side, metric: str | None = None) -> Iterator[Comparison]:
    """Yield the comparison of each task.

    Args:
        ours: the personalised model.
        theirs: the reference.
        metric: as of ``pairing.pair``; None: accuracy, for a regression the loss.

    Raises:
        ConfigError: they can't be compared; says why.
    """
    examples = pairing.kept(ours.runs[0])
    for task in examples.tasks:
        kind = examples(ours.model, task).kind
        by = metric or kind.compared_by
        paired = pairing.pair(ours, theirs, task, by)
        unit = unit_of(by, kind)
        yield Comparison(
            ours=ours.label,
            theirs=theirs.label,
            task=task,
            metric=counted(by, kind),
            unit=unit,
            found=worth(paired),
            reference=theirs.reference,
            **({} if by in CLASS_METRICS else _of_examples(ours, theirs, task, paired.client)),
        )


def _of_examples(ours: Side, theirs: Side, task: str | None, client: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "pooled": tuple(pairing.pooled_gains(ours, theirs, task, client)),
        "aucs": pairing.client_aucs(ours, theirs, task, client),
    }


def subjects(groups: Sequence[Configuration]) -> list[Configuration]:
    """Return the configurations that personalise: all but references, and controls that are trained centrally."""
    return [g for g in groups if g.runs[0].method not in NO_SUBJECT and not g.centralised]


def recognised(group: Configuration, groups: Sequence[Configuration]) -> tuple[list[Side], list[str]]:
    """Return what serves a configuration as references where none are named, and of those that can't why not."""
    found: list[Side] = []
    faults: list[str] = []
    for other in groups:
        if other is not group and other.runs[0].method in REFERENCES and not other.centralised:
            try:
                found.append(pairing.reference_side(other))
            except ConfigError as error:
                faults.append(str(error))
    return found, faults


LARGER = 5
"""Times as many test examples as usual: half of a user's rows in place of a tenth."""


def asked(side: Side) -> int:
    """Return how early a reference is asked for."""
    pooled = side.label.startswith(pairing.ONE_PLACE)
    return 1 if pooled else {"fedavg": 0, "counting": 2}.get(side.reference, 3)


def comparisons(
    own: Side, references: Sequence[Side], metric: str | None = None
) -> tuple[list[Comparison], list[str]]:
    """Return a personalised model against references, and against its shared part alone, where its runs keep that.

    FedAvg, a pooled model and counting come first, which the personalised one is to replace. The shared part stands last: of a method that trains both together it may be worse than any model alone.

    Returns:
        The comparisons, and of those that can't be made why not.

    Raises:
        ConfigError: a run keeps no results of examples.
    """
    shared = pairing.shared_side(own)
    found: list[Comparison] = []
    faults: list[str] = []
    for other in [*sorted(references, key=asked), *([shared] if shared else [])]:
        try:
            found += compare(own, other, metric)
        except ConfigError as error:
            faults.append(f"{own.label} against {other.label}: {error}")
    if not found and not faults:
        faults.append(
            f"There is nothing to compare {own.label} with. Either fedkeep run CONFIG --set run.evaluate_shared=true "
            f"--out NEW, then fedkeep worth NEW; or fedkeep run CONFIG --set method.kind=local --out OTHER (or fedavg, "
            f"fine_tuned), then fedkeep worth RUN --against OTHER. fedkeep compare runs all of them."
        )
    return found, faults


def sentences(c: Comparison) -> tuple[str, ...]:
    """Return what was found in plain words: the gain, whether it helps, who gains and loses."""
    w = c.found
    people = len(w.clients)
    gain = c.interval(w.headline)
    if w.headline is None:
        gain = f"{c.write(float(w.gain.mean()))} {c.unit}, without an interval"
    if c.metric == "hr10":
        gain += f" in {wording.metric_name(c.metric)}"
    better, worse = (math.floor(100 * n / people) for n in (w.at_least_better, w.at_least_worse))
    shares = f" At least {better} % of users gain, at least {worse} % lose." if better or worse else ""
    untold = people - w.count("better") - w.count("worse")
    named = f"Named: {wording.count(w.count('better'), 'user')} better off, {w.count('worse')} worse off"
    if untold:
        named += f"; for the other {untold} the test examples are too few to tell"
    return (
        f"Gain {gain}.{shares}",
        verdict(c),
        f"{named}.{_needed(w) if untold else ''}{_losers(w)}",
    )


def tenths(c: Comparison) -> tuple[str, ...]:
    """Return the gain of the tenths of users that validation chose, in plain words."""
    chosen = ((c.found.worst, "gained least"), (c.found.worst_off, "were worst off"))
    return tuple(
        f"The tenth of users who {which} on validation: gain {c.interval(group.gain)} on test."
        for group, which in chosen
        if group is not None and group.gain is not None
    )


def verdict(c: Comparison) -> str:
    """Say whether the model beats its reference, and for whom."""
    found = c.found.headline
    whom = "these users" if len(c.found.clients) < FEW else "users like these"
    whom += " and these trained models" if len(c.found.seeds) < WHOLE_METHOD else ""
    if found is None:
        return f"It can't be told whether it beats {c.theirs}."
    if found.low > 0:
        return f"It beats {c.theirs}, for {whom}: the whole 95 % interval lies above 0."
    if found.high < 0:
        return f"It does not beat {c.theirs}, and is worse for {whom}: the whole 95 % interval lies below 0."
    return f"It does not beat {c.theirs} for certain: the 95 % interval, for {whom}, holds 0."


def _needed(w: Worth) -> str:
    if w.needed is None:
        return ""
    nobody = w.count("better") + w.count("worse") == 0
    enough = LARGER * int(w.examples.max()) >= w.needed
    split = (
        " Half of their rows would be enough for some: data.fractions = [0.4, 0.1, 0.5]."
        if nobody and enough
        else ""
    )
    return f" To show a difference of 10 points, a user needs about {w.needed:,} test examples.{split}"


def _losers(w: Worth) -> str:
    """Name up to five users who are worse off, the greatest loss first."""
    names = sorted(
        (float(g), wording.printable(n))
        for g, n, v in zip(w.gain, w.clients, w.verdicts, strict=True)
        if v == "worse"
    )
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f" Worse off: {', '.join(name for _, name in names[:5])}{more}." if names else ""


def limits(w: Worth) -> Iterator[str]:
    """Yield which claims can't be made, and why."""
    yield from few(len(w.clients), len(w.seeds))
    if (w.examples < 2).any():
        yield "Some users have one test example only, so nothing is claimed about these users alone."
    elif w.these is None:
        yield "No user's gain varies over test examples, so nothing is claimed about these users alone."
    if w.like_these is None and len(w.clients) >= FEW:
        yield "All users gain as much, so how much of it is chance can't be told: there is no interval."
    if w.worst is None:
        yield "The runs keep no results on validation, so the tenth of users who gain least can't be chosen fairly."


def few(people: int, seeds: int) -> Iterator[str]:
    """Yield which claims so few users or seeds do not allow."""
    if people < FEW:
        yield f"With {wording.count(people, 'user')} nothing is claimed about users like these; that takes {FEW}."
    if seeds < WHOLE_METHOD:
        yield (
            f"With {wording.count(seeds, 'seed')} this is about these trained models; a claim about the method takes "
            f"{WHOLE_METHOD} seeds."
        )


def plain(c: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values, for programs; gains in fractions, nats or squared error."""
    w = c.found
    return {
        "model": c.ours,
        "against": c.theirs,
        "task": c.task,
        "metric": c.metric,
        "unit": c.unit,
        "sentences": [*sentences(c), *tenths(c), *limits(w)],
        "seeds": list(w.seeds),
        "users": len(w.clients),
        "helps": w.helps,
        "like_these": _plain(w.like_these),
        "these": _plain(w.these),
        "at_least_better": w.at_least_better,
        "at_least_worse": w.at_least_worse,
        "better": w.count("better"),
        "worse": w.count("worse"),
        "needed": w.needed,
        "worst": _plain(w.worst),
        "worst_off": _plain(w.worst_off),
        "by_examples": [_plain(g) for g in w.by_examples],
        "fairness": asdict(w.fairness),
        "pooled": {metric: _plain(i) for metric, i in c.pooled},
        "aucs": None if c.aucs is None else {"ours": c.aucs[0].tolist(), "theirs": c.aucs[1].tolist()},
        "clients": [
            {"client": client, "examples": int(n), "gain": float(g), "low": low, "high": high, "verdict": v}
            for client, n, g, (low, high), v in zip(
                w.clients, w.examples, w.gain, w.spans.tolist(), w.verdicts, strict=True
            )
        ],
    }


def _plain(value: Interval | ClientGroup | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


SAID = {"better": "better off", "worse": "worse off", "": "can't be told"}
NOTHING = ("0 %", "0", wording.MISSING)
MOST_NAMED = 200  # users listed in a table


def worth_table(found: Sequence[Comparison], title: str = "") -> TextTable:
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
    first = 3 if several else 2  # what says nothing of any comparison is left out
    said = [j for j in range(len(columns)) if j < first or any(row[j] not in NOTHING for row in rows)]
    note = "Each user counts once. Intervals are 95 %."
    if any(c.found.count(way) for c in found for way in ("better", "worse")):
        note += (
            " Users are named better or worse off by exact paired tests, so that of those named about 5 % at most are "
            "named wrongly."
        )
    if any(c.task for c in found):
        note += f" {wording.BY_FIRST_TASK}"
    if any(c.metric == "hr10" for c in found):
        note += " Of a ranking gains are in HR@10: the right item is among the first ten or not."
    shown = tuple(tuple(row[j] for j in said) for row in rows)
    return TextTable(tuple(columns[j] for j in said), shown, title, note, left=first)


def pooled_table(found: Sequence[Comparison]) -> TextTable:
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
    return TextTable(columns, tuple(rows), "", note, left=3)


def examples_table(found: Sequence[Comparison]) -> TextTable:
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
    return TextTable(("model", "against", "training examples", "users", "gain", "for"), tuple(rows), left=2)


def told_table(found: Sequence[Comparison]) -> TextTable:
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
    return TextTable(columns, tuple(rows), "", note, left=3)


def fairness_table(found: Sequence[Comparison]) -> TextTable:
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
    return TextTable(columns, tuple(rows), "", note, left=2)


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
    yield worth_table(found)
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
            series=(Curve("", x, y, "0", False, low, high),),
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


def _range(g: ClientGroup) -> str:
    return f"{g.least:,}" if g.least == g.most else f"{g.least:,} to {g.most:,}"
