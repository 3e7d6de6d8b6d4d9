"""The result of every example: ``Judgement``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.metrics import CLASS_METRICS, auc
from fedkeep.tasks import Means, Task


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
        whole = zip(*parts, strict=True) if parts else [[np.zeros(0)]] * 5
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
            user_mean=float(np.mean([value for value, _ in self.per_client().values()])),
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
                f"{name} wants every example's predicted class, which no device tells. It is there in simulations."
            )
        return self.label.astype(np.int64), self.predicted

    def right(self) -> np.ndarray:
        """Return 1.0 where an answer is right, else 0.0; a NaN among the outputs makes every answer wrong."""
        assert self.task.kind.right is not None
        return self.task.kind.right(self.score, self.label).astype(float)

    def per_client(self) -> dict[int, tuple[float, int]]:
        """Return by client (``Task.client_metric``, number of examples)."""
        kind = self.task.kind
        clients, count = np.unique(self.client, return_counts=True)

        def means(values: np.ndarray) -> np.ndarray:
            return np.bincount(np.searchsorted(clients, self.client), values, len(clients)) / count

        right = np.zeros(0) if kind.right is None else means(self.right())
        found = kind.of_client(means(self.loss), right)
        return {int(c): (float(m), int(n)) for c, m, n in zip(clients, found, count, strict=True)}
