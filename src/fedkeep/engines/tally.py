"""What judging gives: every example's result (``Judgement``), or counts and sums by client or over all (``Tallies``).

A tally holds no example. What leaves a device is declared by its policy (``Leaves``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.records import Record
from fedkeep.metrics import CLASS_METRICS, auc
from fedkeep.metrics.scores import BINS, bin_of, binned_auc
from fedkeep.tasks import Means, Task
from fedkeep.tasks.results import Model


@dataclass(frozen=True)
class Judgement:
    """A model's predictions of one task, reduced to what the metrics need, example by example.

    Attributes:
        task: the task.
        client: (examples,) index of each example's client.
        loss: (examples,) cross-entropy in nats, or squared error.
        score: (examples,) 1 where the class is right, else 0 (multiclass); the positive class's score (binary);
            the error, predicted − true (regression); the right candidate's rank from 1 (ranking). Of tokens, as of
            classes.
        label: (examples,) the label.
        row: (examples,) the number of the example's row in the data.
        predicted: (examples,) the most probable class; −1 where an output is NaN, or the task is of no classes.
            None: the device told nobody.
    """

    task: Task
    client: np.ndarray
    loss: np.ndarray
    score: np.ndarray
    label: np.ndarray
    row: np.ndarray
    predicted: np.ndarray | None = None

    @classmethod
    def joined(cls, task: Task, parts: Sequence[Sequence[np.ndarray]]) -> Judgement:
        """Return one judgement of the columns of several pieces, in their order."""
        nothing = [[np.zeros(0, kind)] for kind in (np.int64, np.float64, np.float64, np.float64, np.int64)]
        whole = zip(*parts, strict=True) if parts else nothing
        return cls(task, *(np.concatenate(column) for column in whole))

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """What ``joined`` takes, but for ``predicted``."""
        return self.client, self.loss, self.score, self.label, self.row

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all examples pooled, and where it makes sense the unweighted mean over clients."""
        if not len(self.client):
            return {}
        kind, nothing = self.task.kind, float("nan")
        means = Means(
            loss=float(self.loss.mean()),
            right=nothing if kind.right is None else float(self.right().mean()),
            gain=nothing if kind.gain is None else float(kind.gain(self.score, self.label).mean()),
            user_mean=float(self._by_client()[1].mean()),
            auc={"auc": auc(self.score, self.label)} if kind.ranks_scores else {},
        )
        return {self.task.metric(metric): value for metric, value in kind.metrics(means).items()}

    def class_metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return metrics of ``metrics.CLASS_METRICS``, over all examples pooled and as unweighted mean over clients.

        Raises:
            ConfigError: the predicted classes are not known.
        """
        if not len(self.client) or not self.task.kind.has_classes:
            return {}
        own = {name: self.by_client(name).values() for name in names}
        means = {f"{name}_user_mean": float(np.mean([v for v, _ in found])) for name, found in own.items()}
        whole = {name: CLASS_METRICS[name](*self._classes(name)) for name in names}
        return {self.task.metric(name): value for name, value in (whole | means).items()}

    def by_output(self) -> np.ndarray:
        """Return of several numbers an example the RMSE of each, (outputs,), in the units that labels were read in."""
        errors = self.score.reshape(-1, int((self.row == self.row[0]).sum()))  # an example's are neighbours
        scales = 1.0 if self.task.units is None else np.asarray(self.task.units[1])
        return np.asarray(np.sqrt((errors**2).mean(0)) * scales)

    def by_client(self, name: str) -> dict[int, tuple[float, int]]:
        """Return by client (the metric of its own examples, their number), for one of ``metrics.CLASS_METRICS``.

        Raises:
            ConfigError: the predicted classes are not known.
        """
        label, predicted = self._classes(name)
        order = np.argsort(self.client, kind="stable")
        clients, first = np.unique(self.client[order], return_index=True)
        own = zip(clients.tolist(), np.split(order, first[1:]), strict=True)
        return {c: (CLASS_METRICS[name](label[rows], predicted[rows]), len(rows)) for c, rows in own}

    def _classes(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        if self.predicted is None:
            raise ConfigError(
                "{name} wants every example's predicted class, which no device tells. It is there in "
                "simulations.",
                name=name,
            )
        return self.label.astype(np.int64), self.predicted

    def right(self) -> np.ndarray:
        """Return 1.0 where an answer is right, else 0.0; a NaN among the outputs makes every answer wrong."""
        assert self.task.kind.right is not None
        return self.task.kind.right(self.score, self.label).astype(float)

    def per_client(self) -> dict[int, tuple[float, int]]:
        """Return by client (``Task.client_metric``, number of examples)."""
        found = (column.tolist() for column in self._by_client())
        return {client: (metric, count) for client, metric, count in zip(*found, strict=True)}

    def _by_client(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the clients, ascending, each one's ``Task.client_metric``, and its number of examples."""
        kind, own = self.task.kind, self.client.astype(np.int64, copy=False)  # of nobody: floats
        every = np.bincount(own)
        clients = np.flatnonzero(every)
        count = every[clients]

        def means(values: np.ndarray) -> np.ndarray:
            return np.bincount(own, values)[clients] / count

        right = np.zeros(0) if kind.right is None else means(self.right())
        return clients, kind.of_client(means(self.loss), right), count


Leaves = Literal["sums", "clients", "examples"]
"""What of judging leaves a device: sums over all of its clients, sums by client, or every example's result too."""

ROWS = ("people", "count", "loss", "right", "absolute", "accuracy", "agreed", "difference", "scores")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models on the same examples, a row for each client (K), or one for all.

    Attributes:
        clients: (K,) ids; empty text where a row is a sum.
        count: (K,) examples.
        table: (K, 2, 2) examples by whether the first model was right (axis 1: 0 wrong, 1 right) and whether the
            second was (axis 2); zeros for regression.
        difference, square: (K,) sums of d and d², d = loss of the first − loss of the second.
    """

    clients: tuple[str, ...]
    count: np.ndarray
    table: np.ndarray
    difference: np.ndarray
    square: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Tallies:
    """Tallies of one task: K rows, each of a client or of several together, about M models and their P pairs.

    Attributes:
        task: the task.
        models: the models' names.
        clients: (K,) each row's client by id; empty text where a row is a sum over clients.
        people: (K,) int64, how many clients a row is of.
        count: (K,) int64, labelled examples.
        loss: (K, M) Σ loss; for regression that is the sum of squared errors.
        right: (K, M) int64, right answers, of a ranking those among the first ten; 0 for regression.
        absolute: (K, M) Σ of the task's ``Kind.gain``, e.g. |error| of a regression; 0 where it has none.
        accuracy: (K, M) Σ over the row's clients of each one's accuracy; 0 for regression.
        agreed: (K, P, 2, 2) int64, as ``Pair.table``; a pair is (models[i], models[j]), i < j.
        difference: (K, P, 2) Σ d and Σ d², as in ``Pair``.
        scores: (K, M, 2, BINS) int64, examples by label and bin of the score (binary); else no bin.
    """

    task: Task
    models: tuple[Model, ...]
    clients: tuple[str, ...]
    people: np.ndarray
    count: np.ndarray
    loss: np.ndarray
    right: np.ndarray
    absolute: np.ndarray
    accuracy: np.ndarray
    agreed: np.ndarray
    difference: np.ndarray
    scores: np.ndarray

    def total(self) -> Tallies:
        """Return the one row that is the sum of all; the same bits for any order of the rows."""
        columns: dict[str, Any] = {name: summed(getattr(self, name)) for name in ROWS}
        return replace(self, clients=("",), **columns)

    def joined(self, others: Sequence[Tallies]) -> Tallies:
        """Return the rows of this and of others, which are about the same models and task."""
        every = (self, *others)
        if any((t.task, t.models) != (self.task, self.models) for t in others):
            raise ConfigError("Tallies of different tasks or models can't be joined.")
        columns: dict[str, Any] = {name: np.concatenate([getattr(t, name) for t in every]) for name in ROWS}
        return replace(self, clients=tuple(c for t in every for c in t.clients), **columns)

    def metrics(self, model: Model) -> dict[str, float]:
        """Return the metrics over all rows, as ``Judgement.metrics``.

        The AUC comes from bins; ``auc_error`` is the most that it can differ from the exact one.
        """
        one, m = self.total(), self._place(model)
        n = int(one.count[0])
        if not n:
            return {}
        kind = self.task.kind
        means = Means(
            loss=float(one.loss[0, m]) / n,
            right=int(one.right[0, m]) / n,
            gain=float(one.absolute[0, m]) / n,
            user_mean=float(one.accuracy[0, m]) / int(one.people[0]),
            auc=_auc(*one.scores[0, m]) if kind.ranks_scores else {},
        )
        return {self.task.metric(metric): value for metric, value in kind.metrics(means).items()}

    def per_client(self, model: Model) -> dict[str, tuple[float, int]]:
        """Return by client's id (``Task.client_metric``, number of examples); nothing of rows that are sums."""
        m = self._place(model)
        with np.errstate(invalid="ignore"):  # of a client that was not judged it is no number
            means = self.task.kind.of_client(self.loss[:, m] / self.count, self.right[:, m] / self.count)
        rows = zip(self.clients, means.tolist(), self.count.tolist(), strict=True)
        return {client: (mean, n) for client, mean, n in rows if client}

    def pair(self, first: Model, second: Model) -> Pair:
        """Return two models side by side."""
        i, j = self._place(first), self._place(second)
        if i == j:
            raise ConfigError("A pair wants two models; got {got!r} twice.", got=first)
        p = list(combinations(range(len(self.models)), 2)).index((min(i, j), max(i, j)))
        table, sign = self.agreed[:, p], 1
        if i > j:
            table, sign = table.transpose(0, 2, 1), -1
        return Pair(
            clients=self.clients,
            count=self.count,
            table=table,
            difference=sign * self.difference[:, p, 0],
            square=self.difference[:, p, 1],
        )

    def _place(self, model: Model) -> int:
        if model not in self.models:
            raise ConfigError(
                "{model!r} was not judged; there are {known}.", model=model, known=list(self.models)
            )
        return self.models.index(model)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What comes back of judging one task.

    Attributes:
        task: the task.
        models: the models' names.
        leaves: the device's policy.
        table: the tallies; None where every example's result is there, and they follow from these.
        examples: a judgement for each model, on the same examples in the same order; empty unless the policy allows.
        roster: the ids that clients' indices in ``examples`` stand for.
    """

    task: Task
    models: tuple[Model, ...]
    leaves: Leaves
    table: Tallies | None = None
    examples: tuple[Judgement, ...] = ()
    roster: Sequence[str] = ()

    @cached_property
    def tallies(self) -> Tallies:
        """The tallies, a row for each client with such examples, or one for all."""
        return (
            self.table
            if self.table is not None
            else tallied(self.task, self.models, self.examples, self.roster)
        )

    def of(self, model: Model) -> Judgement:
        """Return every example's result.

        Raises:
            ConfigError: the policy keeps them on the device, or the model was not judged.
        """
        if not self.examples or model not in self.models:
            raise ConfigError(
                "Wanted every example's result of {model!r}; there are {known}, and the device's policy is "
                "{policy!r}. Only 'examples' lets them leave.",
                model=model,
                known=list(self.models),
                policy=self.leaves,
            )
        return self.examples[self.models.index(model)]

    def metrics(self, model: Model, also: Sequence[str] = ()) -> dict[str, float]:
        """Return the metrics over all examples: exact from examples; else from sums, and the AUC from bins.

        ``also`` names some of ``metrics.CLASS_METRICS``, which want examples.
        """
        found = self.of(model).metrics() if self.examples else self.tallies.metrics(model)
        return found | (self.of(model).class_metrics(also) if also else {})

    def per_client(self, model: Model, metric: str = "") -> dict[str, tuple[float, int]]:
        """Return by client's id (``Task.client_metric``, number of examples); nothing where only sums are known.

        ``metric`` may be one of ``metrics.CLASS_METRICS`` instead, which want examples.
        """
        if metric:
            return {str(self.roster[c]): found for c, found in self.of(model).by_client(metric).items()}
        if not self.examples:
            return self.tallies.per_client(model)
        return {str(self.roster[c]): found for c, found in self.of(model).per_client().items()}

    @property
    def count(self) -> int:
        """How many examples were judged."""
        return len(self.examples[0].client) if self.examples else int(self.tallies.count.sum())


def to_records(
    judged: Sequence[Judged],
    model: Model,
    round: int,
    epoch: float,
    split: str,
    per_client: bool,
    also: Sequence[str] = (),
) -> list[Record]:
    """Return a model's records: the aggregates, and with ``per_client`` a line for each client too.

    ``also`` names metrics as for ``Judged.metrics``.
    """
    records = []
    for one in judged:
        metrics = one.metrics(model, also)
        records += [Record(round, epoch, split, None, m, v, one.count) for m, v in metrics.items()]
        if not per_client:
            continue
        own = {one.task.client_metric: one.per_client(model)}
        if one.count and one.task.kind.has_classes:
            own |= {one.task.metric(name): one.per_client(model, name) for name in also}
        for metric, found in own.items():
            records += [Record(round, epoch, split, c, metric, value, n) for c, (value, n) in found.items()]
    return records


def tallied(
    task: Task, models: Sequence[Model], judgements: Sequence[Judgement], roster: Sequence[str]
) -> Tallies:
    """Return the tallies of judgements of several models on the same examples, a row for each client."""
    clients, place = np.unique(judgements[0].client, return_inverse=True)
    people, kind = len(clients), task.kind
    count = np.bincount(place, minlength=people)

    def sums(columns: Sequence[np.ndarray]) -> np.ndarray:
        found = [np.bincount(place, weights=column, minlength=people) for column in columns]
        return (
            np.stack(found, 1).astype(np.float64) if found else np.zeros((people, 0))
        )  # of nobody: integers

    nothing = np.zeros((people, len(models)))
    right = nothing if kind.right is None else sums([j.right() for j in judgements])
    gains = nothing if kind.gain is None else sums([kind.gain(j.score, j.label) for j in judgements])
    tables, differences = [], []
    for a, b in combinations(judgements, 2):
        d = a.loss - b.loss
        differences.append(sums([d, d**2]))
        cell = 2 * a.right().astype(int) + b.right().astype(int) if kind.right is not None else None
        table = (
            np.zeros(4 * people, int) if cell is None else np.bincount(4 * place + cell, minlength=4 * people)
        )
        tables.append(table.reshape(people, 2, 2))
    scores = [_histogram(j, place, people) for j in judgements] if kind.ranks_scores else []
    return Tallies(
        task=task,
        models=tuple(models),
        clients=tuple(str(roster[int(c)]) for c in clients),
        people=np.ones(people, np.int64),
        count=count.astype(np.int64),
        loss=sums([j.loss for j in judgements]),
        right=right.astype(np.int64),
        absolute=gains,
        accuracy=right / count[:, None],
        agreed=np.stack(tables, 1) if tables else np.zeros((people, 0, 2, 2), np.int64),
        difference=np.stack(differences, 1) if differences else np.zeros((people, 0, 2)),
        scores=np.stack(scores, 1) if scores else np.zeros((people, len(models), 2, 0), np.int64),
    )


def _auc(negative: np.ndarray, positive: np.ndarray) -> dict[str, float]:
    value, error = binned_auc(positive, negative)
    return {"auc": value, "auc_error": error}


def _histogram(judgement: Judgement, place: np.ndarray, people: int) -> np.ndarray:
    cell = (2 * place + (judgement.label > 0)) * BINS + bin_of(judgement.score)
    return np.bincount(cell, minlength=2 * BINS * people).reshape(people, 2, BINS)


def summed(rows: np.ndarray) -> np.ndarray:
    """Return the sum over the first axis, which stays: integers as they are, floats rounded once (``math.fsum``).

    A sum that no float holds is NaN.
    """
    if rows.dtype.kind == "i":
        return np.asarray(rows.sum(0, keepdims=True))
    total = [_summed(column) for column in rows.reshape(len(rows), math.prod(rows.shape[1:])).T]
    return np.array(total).reshape(1, *rows.shape[1:])


def _summed(column: np.ndarray) -> float:
    try:
        return math.fsum(column)
    except (OverflowError, ValueError):  # beyond a float's range, or infinities of both signs
        return math.nan
