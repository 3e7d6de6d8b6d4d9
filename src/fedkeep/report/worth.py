"""What personalisation was worth: comparisons of runs, and what they say in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.metrics import CLASS_METRICS
from fedkeep.metrics.worth import Group, Interval, Worth, worth
from fedkeep.metrics.worth.gains import FEW, WHOLE_METHOD
from fedkeep.report import pairing, wording
from fedkeep.report.groups import Configuration
from fedkeep.report.pairing import REFERENCES, Side
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


def comparisons(
    own: Side, references: Sequence[Side], metric: str | None = None
) -> tuple[list[Comparison], list[str]]:
    """Return a personalised model against the shared part alone, where its runs keep that, and against references.

    Returns:
        The comparisons, and of those that can't be made why not.

    Raises:
        ConfigError: a run keeps no results of examples.
    """
    shared = pairing.shared_side(own)
    found: list[Comparison] = []
    faults: list[str] = []
    for other in [*([shared] if shared else []), *references]:
        try:
            found += compare(own, other, metric)
        except ConfigError as error:
            faults.append(f"{own.label} against {other.label}: {error}")
    if not found and not faults:
        faults.append(
            f"{own.label} has nothing to be compared with. Run it with evaluate_shared = true, or take a run of "
            f"fedavg, local or fine_tuned on the same data along."
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
    untold = people - w.count("better") - w.count("worse")
    named = f"Named: {wording.count(w.count('better'), 'user')} better off, {w.count('worse')} worse off"
    if untold:
        named += f"; for the other {untold} the test examples are too few to tell"
    return (
        f"Gain {gain}. At least {better} % of users gain, at least {worse} % lose.",
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
    return f" A difference of 10 points takes about {w.needed:,} test examples of a user."


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


def _plain(value: Interval | Group | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
