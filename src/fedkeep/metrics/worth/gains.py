"""What personalisation was worth, for whom: from paired results of single test examples to one frozen record.

d_kis is the personalised model's result less the reference's, of client k's test example i under seed s: right answers,
or losses with their sign changed, so that more is better. Both models see the same examples under the same seed. Each
client counts once, whatever its number of examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.metrics.worth.intervals import Floats, Interval, t_quantile, these_users, users_like_these
from fedkeep.metrics.worth.signs import (
    ALPHA,
    ENOUGH,
    Flips,
    at_least,
    examples_needed,
    false_discovery,
    sign_flips,
)

FEW = 10
"""With fewer clients nothing is said of users like these."""
WHOLE_METHOD = 3
"""With fewer seeds nothing is said of the method, only of these trained models."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Paired:
    """Two models' results of the same test examples.

    Attributes:
        clients: K ids.
        seeds: S seeds.
        client: (n,) each example's client as a place in ``clients``; every client has an example.
        ours, theirs: (S, n) results of the personalised model and of the reference, more is better: 1 and 0 of an
            integer type for right and wrong, or float64 losses with their sign changed.
        trained: (K,) numbers of training examples; None where they are not known.
        valid: (2, K) each client's mean result on validation, of ours and theirs; NaN for a client without such
            examples; None where they are not known.

    Raises:
        DataError: shapes don't fit, a value is NaN or infinite, or a client has no example.
    """

    clients: tuple[str, ...]
    seeds: tuple[int, ...]
    client: Array
    ours: Array
    theirs: Array
    trained: Array | None = None
    valid: Floats | None = None

    def __post_init__(self) -> None:
        people, wanted = len(self.clients), (len(self.seeds), len(self.client))
        if not wanted[0] or self.ours.shape != wanted or self.theirs.shape != wanted:
            raise DataError(
                "Paired results: wanted two arrays of shape (seeds, examples) = {wanted} with at least one "
                "seed; got {got} and {shape}.",
                wanted=wanted,
                got=self.ours.shape,
                shape=self.theirs.shape,
            )
        if not (np.isfinite(self.ours).all() and np.isfinite(self.theirs).all()):
            raise DataError("Paired results: a value is NaN or infinite.")
        if set(np.unique(self.client).tolist()) != set(range(people)):
            raise DataError(
                "Paired results: each of the {people} clients wants an example, and no other.",
                people=people,
            )
        for name, found, shape in (
            ("trained", self.trained, (people,)),
            ("valid", self.valid, (2, people)),
        ):
            if found is not None and found.shape != shape:
                raise DataError(
                    "Paired results: {name} wants the shape {shape}; got {got}.",
                    name=name,
                    shape=shape,
                    got=found.shape,
                )

    def only(self, chosen: Array) -> Paired:
        """Return the results of some clients alone.

        Args:
            chosen: (k,) their places in ``clients``, in rising order.
        """
        rows = np.isin(self.client, chosen)
        return Paired(
            clients=tuple(self.clients[c] for c in chosen),
            seeds=self.seeds,
            client=np.searchsorted(chosen, self.client[rows]),
            ours=self.ours[:, rows],
            theirs=self.theirs[:, rows],
            trained=None if self.trained is None else self.trained[chosen],
            valid=None if self.valid is None else self.valid[:, chosen],
        )

    @cached_property
    def examples(self) -> Array:
        """(K,) numbers of test examples."""
        return np.bincount(self.client, minlength=len(self.clients))

    @cached_property
    def differences(self) -> Array:
        """(S, n) d; of an integer type for right answers."""
        kind = np.int64 if self.ours.dtype.kind in "biu" else np.float64
        found: Array = self.ours.astype(kind) - self.theirs.astype(kind)
        return found

    @property
    def most(self) -> float:
        """What no gain and no end of an interval goes beyond: 1 for right answers."""
        return 1.0 if self.differences.dtype.kind == "i" else math.inf

    def interval(self, found: Floats) -> Interval | None:
        """Return a mean gain and its ends as an interval, cut at ``most``; None where it has no width.

        It has none where no difference varies, which says nothing of how much is chance.
        """
        mean, low, high = found.tolist()
        return None if low == high else Interval(mean, max(low, -self.most), min(high, self.most))

    def means(self, values: Array) -> Floats:
        """Return the mean over each client's examples: (S, n) or (n,) gives (S, K) or (K,)."""
        rows = np.atleast_2d(values)
        sums = np.stack([np.bincount(self.client, row, len(self.clients)) for row in rows])
        found: Floats = (sums / self.examples).reshape(*values.shape[:-1], -1)
        return found

    @cached_property
    def variance(self) -> Floats:
        """(K,) sample variance over a client's examples of d, averaged over seeds; NaN with one example."""
        mean = self.differences.mean(0)
        off = (mean - self.means(mean)[self.client]) ** 2
        sums = np.bincount(self.client, off, len(self.clients))
        found: Floats = np.divide(
            sums, self.examples - 1, out=np.full(len(sums), np.nan), where=self.examples > 1
        )
        return found

    def flips(self) -> list[Flips]:
        """Return each client's test, of its differences summed over seeds."""
        total = self.differences.sum(0)
        order = np.argsort(self.client, kind="stable")
        return [sign_flips(own) for own in np.split(total[order], np.cumsum(self.examples)[:-1])]


@dataclass(frozen=True, kw_only=True)
class ClientGroup:
    """Some of the clients.

    Attributes:
        clients: how many.
        least, most: their least and greatest number of training examples; 0 where these are not known.
        gain: their mean test gain; for users like these from ten clients on, else for these users; None where
            neither is known.
        alike: whether the interval is for users like these.
    """

    clients: int
    least: int
    most: int
    gain: Interval | None
    alike: bool


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """How unequal clients are, under the reference and under the personalised model.

    Attributes:
        deviation: standard deviation over clients of a client's mean test result: (theirs, ours).
        lowest: the result below which the lowest tenth of clients lie: (theirs, ours).
    """

    deviation: tuple[float, float]
    lowest: tuple[float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Worth:
    """What personalisation was worth.

    Attributes:
        clients, seeds: as in ``Paired``.
        examples: (K,) test examples.
        gain: (K,) each client's mean gain.
        spans: (K, 2) ends of each client's own 95 % interval over its test examples; NaN with one example, and where
            its examples all differ alike.
        verdicts: (K,) ``"better"``, ``"worse"`` or ``""``: can't be told.
        like_these: the mean gain for users like these; None with one client, and where all gain as much.
        these: the mean gain for these users; None where a client has one test example only, and where no client's
            examples differ from each other.
        tested: clients with enough differing examples to be told.
        at_least_better, at_least_worse: lower bounds of how many clients gain and lose, each with 95 % confidence.
        needed: test examples that a client needs to be told from 10 points of accuracy on; None for losses.
        worst: the tenth of clients with the least gain on validation; None where that is not known.
        worst_off: the tenth with the lowest result of the reference on validation; None where that is not known.
        by_examples: quarters of clients by number of training examples; empty where these are not known.
        fairness: how unequal clients are.
    """

    clients: tuple[str, ...]
    seeds: tuple[int, ...]
    examples: Array
    gain: Floats
    spans: Floats
    verdicts: tuple[str, ...]
    like_these: Interval | None
    these: Interval | None
    tested: int
    at_least_better: int
    at_least_worse: int
    needed: int | None
    worst: ClientGroup | None
    worst_off: ClientGroup | None
    by_examples: tuple[ClientGroup, ...]
    fairness: Fairness

    @property
    def headline(self) -> Interval | None:
        """The interval to name first: for users like these, for these users where there are fewer than ten."""
        return self.these if len(self.clients) < FEW else self.like_these

    @property
    def helps(self) -> bool:
        """Whether the whole headline interval lies above 0."""
        return self.headline is not None and self.headline.low > 0

    def count(self, verdict: str) -> int:
        """Return how many clients have a verdict."""
        return self.verdicts.count(verdict)


def worth(paired: Paired) -> Worth:
    """Return what personalisation was worth, for whom."""
    p, everyone = paired, np.arange(len(paired.clients))
    y, flips = p.means(p.differences), p.flips()
    gain = y.mean(0)
    some = p.examples > 1
    half = np.full(len(everyone), np.nan)
    half[some] = t_quantile(p.examples[some] - 1.0) * np.sqrt(p.variance[some] / p.examples[some])
    half[half <= 1e-12 * np.abs(gain)] = np.nan  # rounding alone
    share = float(np.mean(p.differences.mean(0) ** 2)) if p.most == 1 else None
    attainable = [f.attainable for f in flips]
    return Worth(
        clients=p.clients,
        seeds=p.seeds,
        examples=p.examples,
        gain=gain,
        spans=np.clip(np.stack([gain - half, gain + half], 1), -p.most, p.most),
        verdicts=_verdicts(flips),
        like_these=_like_these(p, y),
        these=_these(p, y, everyone),
        tested=sum(f.differing >= ENOUGH for f in flips),
        at_least_better=at_least([f.better for f in flips], attainable),
        at_least_worse=at_least([f.worse for f in flips], attainable),
        needed=None if share is None else examples_needed(share),
        worst=_tenth(p, y, None if p.valid is None else p.valid[0] - p.valid[1]),
        worst_off=_tenth(p, y, None if p.valid is None else p.valid[1]),
        by_examples=_quarters(p, y),
        fairness=_fairness(p),
    )


def _like_these(p: Paired, y: Floats) -> Interval | None:
    return p.interval(users_like_these(y)) if y.shape[1] > 1 else None


def _these(p: Paired, y: Floats, who: Array) -> Interval | None:
    if (p.examples[who] < 2).any():
        return None
    return p.interval(these_users(y[:, who], p.variance[who], p.examples[who]))


def _verdicts(flips: Sequence[Flips]) -> tuple[str, ...]:
    """Return who is named: the false-discovery rate is 5 % once for better and once for worse."""
    out = np.full(len(flips), "", dtype="U6")
    able = np.array([f.differing >= ENOUGH for f in flips])
    if able.any():
        for verdict in ("better", "worse"):
            p = np.array([getattr(f, verdict) for f in flips])[able]
            out[np.flatnonzero(able)[false_discovery(p) <= ALPHA]] = verdict
    return tuple(out.tolist())


def _group(p: Paired, y: Floats, who: Array) -> ClientGroup:
    alike = len(who) >= FEW
    sizes = p.trained[who] if p.trained is not None else np.zeros(1, np.int64)
    gain = _like_these(p, y[:, who]) if alike else _these(p, y, who)
    return ClientGroup(
        clients=len(who), least=int(sizes.min()), most=int(sizes.max()), gain=gain, alike=alike
    )


def _tenth(p: Paired, y: Floats, values: Floats | None) -> ClientGroup | None:
    """Return the tenth of clients, at least one, with the lowest values; of equals the first."""
    if values is None or np.isnan(values).all():
        return None
    known = np.flatnonzero(~np.isnan(values))
    chosen = known[np.argsort(values[known], kind="stable")][: max(1, len(known) // 10)]
    return _group(p, y, chosen)


def _quarters(p: Paired, y: Floats) -> tuple[ClientGroup, ...]:
    """Return quarters by number of training examples; clients with as many examples stay together."""
    if p.trained is None:
        return ()
    edges = np.quantile(p.trained, (0.25, 0.5, 0.75))
    place = np.searchsorted(edges, p.trained, side="left")
    return tuple(_group(p, y, np.flatnonzero(place == quarter)) for quarter in np.unique(place).tolist())


def _fairness(p: Paired) -> Fairness:
    theirs, ours = p.means(p.theirs.mean(0)), p.means(p.ours.mean(0))
    return Fairness(
        deviation=(float(theirs.std()), float(ours.std())),
        lowest=(float(np.quantile(theirs, 0.1)), float(np.quantile(ours, 0.1))),
    )
