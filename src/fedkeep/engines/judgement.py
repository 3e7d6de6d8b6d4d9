"""What is judged, and the result of every example: ``Task``, ``Judgement``, and the names of models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError, DataError, check_choice
from fedkeep.core.examples import MODELS, Model
from fedkeep.core.ranking import discounted, hits
from fedkeep.data.checks import TASKS
from fedkeep.metrics import CLASS_METRICS, auc

__all__ = ["MODELS", "Judgement", "Model", "Task", "kinds_of", "tasks_in"]


@dataclass(frozen=True)
class Task:
    """What is judged: one of ``data.checks.TASKS``, and where label and output are found.

    A ranking's output are the scores of candidates, and its label is the right one's place among them. Of ``tokens``
    and ``next_token`` each token with a label is an example.
    """

    kind: str
    label: str = "label"
    name: str | None = None

    def metric(self, base: str) -> str:
        """Return the metric's name, with the task's name where there are several."""
        return base if self.name is None else f"{base}/{self.name}"

    @property
    def has_classes(self) -> bool:
        """Whether a label is a class, so that the metrics of ``metrics.CLASS_METRICS`` are defined."""
        return self.kind not in ("regression", "ranking")

    @property
    def client_metric(self) -> str:
        """The name of what ``Judgement.per_client`` gives: accuracy, RMSE for regression, HR@10 for a ranking."""
        return self.metric({"regression": "rmse", "ranking": "hr10"}.get(self.kind, "accuracy"))


def perplexity(loss: float) -> float:
    """Return e to the mean loss in nats."""
    return math.exp(min(loss, 700.0))  # beyond, a float64 has no room


def tasks_in(meta: Mapping[str, Any]) -> list[Task]:
    """Return the tasks that a data set's description names.

    Raises:
        DataError: one of several has no kind or no column of labels.
    """
    several = meta.get("tasks")
    if not several:
        return [Task(meta.get("task", "multiclass"))]
    for name, task in several.items():
        check_choice(f"meta['tasks'][{name!r}]['task'] must be", task.get("task"), TASKS, DataError)
        if "label" not in task:
            raise DataError(
                f"meta['tasks'][{name!r}] must name its column of labels as 'label'; got {task!r}."
            )
    return [Task(task["task"], task["label"], name) for name, task in several.items()]


def kinds_of(tasks: Sequence[Task]) -> str | dict[str, str]:
    """Return the kind of the only task, or of several by their names."""
    return {task.name: task.kind for task in tasks if task.name is not None} or tasks[0].kind


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
        name = self.task.metric
        own = self.per_client()
        out = {name("loss"): float(self.loss.mean())}
        if self.task.kind == "regression":
            out[name("rmse")] = float(np.sqrt(self.loss.mean()))
            out[name("mae")] = float(np.abs(self.score).mean())
            return out
        if self.task.kind == "ranking":
            found = {"hr10": hits(self.score), "ndcg10": discounted(self.score)}
            return out | {name(metric): float(values.mean()) for metric, values in found.items()}
        out[name("accuracy")] = float(self.right().mean())
        out[name("accuracy_user_mean")] = float(np.mean([value for value, _ in own.values()]))
        if self.task.kind == "binary":
            out[name("auc")] = auc(self.score, self.label)
        if self.task.kind == "next_token":
            out[name("perplexity")] = perplexity(out[name("loss")])
        return out

    def class_metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return metrics of ``metrics.CLASS_METRICS``, over all examples pooled and as unweighted mean over clients.

        Raises:
            ConfigError: the predicted classes are not known.
        """
        if not len(self.client) or not self.task.has_classes:
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
        binary = self.task.kind == "binary"
        return ((self.label > 0).astype(np.int64) if binary else self.label), self.predicted

    def right(self) -> np.ndarray:
        """Return 1.0 where the most probable class is the label, or it is in a ranking's first ten; else 0.0.

        A NaN among the outputs makes every answer wrong.
        """
        if self.task.kind == "ranking":
            return hits(self.score).astype(float)
        if self.task.kind == "binary":
            agrees: np.ndarray = ((self.score > 0) == (self.label > 0)) & ~np.isnan(self.score)
            return agrees.astype(float)
        return self.score

    def per_client(self) -> dict[int, tuple[float, int]]:
        """Return by client (``Task.client_metric``, number of examples)."""
        values = self.loss if self.task.kind == "regression" else self.right()
        clients, count = np.unique(self.client, return_counts=True)
        sums = np.bincount(np.searchsorted(clients, self.client), weights=values, minlength=len(clients))
        means = sums / count
        if self.task.kind == "regression":
            means = np.sqrt(means)
        return {int(c): (float(m), int(n)) for c, m, n in zip(clients, means, count, strict=True)}
