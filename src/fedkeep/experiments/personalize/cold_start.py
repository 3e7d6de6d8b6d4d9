"""Cold start: a metric against the number of own examples, on clients that were not in federation.

Source: the local step of Federated Reconstruction (Singhal et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.records import Record
from fedkeep.data import FederatedData
from fedkeep.data.ids import SomeIds
from fedkeep.engines import to_records
from fedkeep.engines.adapt import first_rows
from fedkeep.experiments.personalize.adapted_runs import adapt_clients
from fedkeep.experiments.progress import make_progress
from fedkeep.metrics.worth.gains import FEW
from fedkeep.metrics.worth.intervals import Interval, chance_of_users, users_like_these
from fedkeep.metrics.worth.signs import holm
from fedkeep.report.wording import is_fraction, lower_is_better
from fedkeep.tasks import Task, tasks_in

if TYPE_CHECKING:
    from fedkeep.experiments.run import Run

ALPHA = 0.05
DEFAULT_K: tuple[int | None, ...] = (0, 1, 2, 5, 10, 20, 50, None)


@dataclass(frozen=True)
class ColdStart:
    """A metric against the number k of own examples.

    Attributes:
        metric: the metric of ``pooled``: accuracy, AUC or RMSE.
        user_metric: the metric of ``mean`` and ``std``; accuracy for a binary task, as a user's few examples may
            all have one label, which leaves no AUC.
        k: the numbers of examples; None means all.
        pooled: the metric over all clients' test examples.
        records: a line per k, split ``cold_start``; ``n`` is the number of test examples, ``metric`` carries k.
        each: a row per k, ``user_metric`` of every client with test examples, in one order.
        frequent: mean over clients of the accuracy of the label that is most frequent among the same k examples.
            Labels that tie count by their mean. None with no example, and where there are no classes.
    """

    metric: str
    user_metric: str
    k: tuple[int | None, ...]
    pooled: tuple[float, ...]
    records: tuple[Record, ...] = field(repr=False)
    each: tuple[tuple[float, ...], ...] = field(repr=False)
    frequent: tuple[float | None, ...] = field(repr=False)

    @property
    def clients(self) -> int:
        """How many clients were measured: those with test examples."""
        return len(self.each[0])

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean over clients, each counted once."""
        return tuple(float(np.mean(row)) for row in self.each)

    @property
    def std(self) -> tuple[float, ...]:
        """Deviation between clients."""
        return tuple(float(np.std(row)) for row in self.each)

    @property
    def changes(self) -> tuple[Interval | None, ...]:
        """From the k before to each k: the mean change and its 95 % interval for users like these.

        None at the first k, everywhere with fewer than ten clients, and where all change alike: nothing says then how
        much of it is chance. Ends of fractions lie within ±1.
        """
        return (None, *(self._change(i, j) for i, j in pairwise(range(len(self.k)))))

    @property
    def falls(self) -> tuple[tuple[int, int | None, Interval], ...]:
        """The pairs (k, larger k) between which the metric becomes significantly worse, with the mean change.

        Of all that are named, the chance that any is named wrongly is at most 5 %: p is corrected for the number of
        pairs (Holm). The intervals are each pair's own.
        """
        size = [float("inf") if k is None else k for k in self.k]
        rising = sorted(range(len(size)), key=size.__getitem__)
        pairs = [(i, j) for i, j in combinations(rising, 2) if self.k[i] is not None]
        if not pairs or len(self.each[0]) < FEW:
            return ()
        chance = holm([float(chance_of_users(self._each_change(i, j))) for i, j in pairs])
        found = []
        for (i, j), p in zip(pairs, chance, strict=True):
            few, change = self.k[i], self._change(i, j)
            assert few is not None  # left out above
            if change is None:
                continue
            worse = change.mean > 0 if lower_is_better(self.user_metric) else change.mean < 0
            if worse and p <= ALPHA:
                found.append((few, self.k[j], change))
        return tuple(found)

    def _each_change(self, first: int, second: int) -> np.ndarray:
        """Return every client's change, as one seed's: (1, clients)."""
        return np.subtract(self.each[second], self.each[first])[None]

    def _change(self, first: int, second: int) -> Interval | None:
        change = self._each_change(first, second)
        if change.size < FEW:
            return None
        mean, low, high = users_like_these(change).tolist()
        most = 1.0 if is_fraction(self.user_metric) else math.inf
        return None if low == high else Interval(mean, max(low, -most), min(high, most))


def cold_start(
    run: Run,
    clients: Iterable[str | int] | None = None,
    ks: Sequence[int | None] = DEFAULT_K,
    *,
    split: str = "test",
    progress: bool | None = None,
) -> ColdStart:
    """Measure a metric against the number of own examples, on clients that were not in federation.

    Args:
        run: a finished run.
        clients: their ids; by default of the clients that the run held out. Those without such examples are left out.
        ks: numbers of training examples of each client; None means all. A client that has fewer uses all.
        split: where to measure.
        progress: as for ``simulate``.

    Raises:
        ConfigError: there is no client to measure, or a k is no whole number from 0 on.
        DataError: there is no such client.
    """
    named = run.members(run.held_out if clients is None else clients)
    if not named:
        raise ConfigError(
            "No client was held out of this run. Run with hold_out=0.1, or name clients to measure."
        )
    chosen = SomeIds(run.data.ids, named.positions[run.data.counts(split)[named.positions] > 0])
    if not chosen:
        raise ConfigError(
            "None of the {count} clients has {split} examples, so there is no cold start.",
            count=len(named),
            split=split,
        )
    if any(not (k is None or (isinstance(k, Integral) and k >= 0)) for k in ks):
        raise ConfigError("k must be a whole number from 0 on, or None for all; got {ks}.", ks=list(ks))
    task, records = tasks_in(run.data.meta)[0], list[Record]()
    pooled, each = list[float](), list[tuple[float, ...]]()
    with make_progress(progress, "cold start", len(ks) * len(chosen)) as bar:
        for number, k in enumerate(ks, 1):
            found = adapt_clients(run, chosen, begin="default", examples=k, progress=False)
            judged = found.judge(("adapted",), split)
            bar.update(number * len(chosen), {})
            each.append(tuple(value for value, _ in judged[0].per_client("adapted").values()))
            pooled.append(judged[0].metrics("adapted")[task.headline])
            name = f"cold_start/{'all' if k is None else k}"
            records += to_records(judged, "adapted", run.round, run.epoch, name, per_client=True)
    return ColdStart(
        metric=task.headline,
        user_metric=task.client_metric,
        k=tuple(ks),
        pooled=tuple(pooled),
        records=tuple(records),
        each=tuple(each),
        frequent=tuple(_frequent(run, task, chosen, k, split) for k in ks),
    )


def _frequent(run: Run, task: Task, clients: SomeIds, k: int | None, split: str) -> float | None:
    """Return the mean over clients of the accuracy of the label most frequent among k examples of their own."""
    if k == 0 or not task.kind.one_class:
        return None
    shares = []
    for client in clients.positions.tolist():
        seen = labels_of(run.data, task, first_rows(run.job, client, k))
        judged = labels_of(run.data, task, np.asarray(run.data.rows(client, split), np.int64))
        if len(judged):
            labels, count = np.unique(seen, return_counts=True)
            shares.append(
                (judged[:, None] == labels[count == count.max(initial=0)]).mean() if len(seen) else 0.0
            )
    return float(np.mean(shares))


def labels_of(data: FederatedData, task: Task, rows: np.ndarray) -> np.ndarray:
    """Return a task's labels of examples by row number, those without its label left out."""
    labels: np.ndarray = task.judged(np.asarray(data.columns[task.label])[rows])
    return labels[~np.isnan(labels) if labels.dtype.kind == "f" else labels >= 0]
