"""What a task is: `Kind`, a frozen record of all that sets one kind of task apart, and `Task`, one that data have.

A new kind is a file beside this one with its record, its line in ``KINDS``, and its row in the tests' table of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from fedkeep.core.errors import DataError
from fedkeep.metrics.worth.pooled_gains import Pooled, mean_pooled

Array = np.ndarray[Any, Any]
Numbers = TypeVar("Numbers", Tensor, Array)
Judge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""From outputs in float64 and labels, an entry for each result: loss, score, and predicted class where there is one."""
Said = tuple[str | float | list[float] | list[str], dict[str, float]]
"""What a model says of a row: a label, several labels or numbers, and of labels their probabilities by name."""


COUNTING = "counting each user's labels"
"""What counting is called where labels are classes, or several tasks are counted."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric, and its words on a page.

    Attributes:
        name: in records, e.g. ``rmse``.
        words: for people, e.g. ``RMSE``.
        lower: whether a lower value is better.
        fraction: whether it is a fraction in [0, 1], written in percent.
    """

    name: str
    words: str
    lower: bool = False
    fraction: bool = False


LOSS = Metric(name="loss", words="Loss", lower=True)
ACCURACY = Metric(name="accuracy", words="Accuracy", fraction=True)
ACCURACY_USER_MEAN = Metric(name="accuracy_user_mean", words="Accuracy, mean over users", fraction=True)
AUC = Metric(name="auc", words="AUC", fraction=True)


@dataclass(frozen=True, kw_only=True)
class Means:
    """What metrics over all results are made of.

    Attributes:
        loss: the mean loss.
        right: the share of right answers.
        gain: the mean of ``Kind.gain``.
        user_mean: the mean over clients of each one's share of right answers.
        auc: the AUC, where scores are kept for it; from bins ``auc_error`` too, the most that it can be wrong.
    """

    loss: float
    right: float
    gain: float
    user_mean: float
    auc: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What counting has of a client's training examples, and the results that it is asked for.

    Attributes:
        clients: how many there are, K.
        owner: (examples,) each training example's client.
        weight: (examples,) how much it counts.
        label: (examples,) its label; (examples, labels) where it has several.
        asked: (results,) whose each result is.
        place: (results,) of several labels of an example the number of the one that it is of.
        true: (results,) the label.
        trained_items, asked_items: the column ``item`` of training examples and of results, where there is one.
    """

    clients: int
    owner: Array
    weight: Array
    label: Array
    asked: Array
    true: Array
    place: Array | None = None
    trained_items: Array | None = None
    asked_items: Array | None = None


def own_means(known: Baseline, everywhere: Array | float) -> Array:
    """Return of each result the mean label of its client's training examples, and of one more that is ``everywhere``.

    Args:
        known: the examples and the results.
        everywhere: of each label of an example what all clients' examples say of it.

    Returns:
        (results,) float64.
    """
    total = np.bincount(known.owner, known.weight, known.clients)
    columns = known.label.reshape(len(known.label), -1).T
    sums = np.stack([np.bincount(known.owner, known.weight * own, known.clients) for own in columns], 1)
    means = ((sums + everywhere) / (total + 1)[:, None])[known.asked]
    return np.asarray(means[np.arange(len(means)), 0 if known.place is None else known.place])


@dataclass(frozen=True, kw_only=True)
class Counting:
    """The reference that learns nothing: what it is called, and what it makes of examples.

    Attributes:
        name: for people.
        needs: what it does without, after "which".
        found: returns ``loss``, ``score`` and, of classes, ``class`` of each result.
    """

    name: str = COUNTING
    needs: str = "needs no federation"
    found: Callable[[Baseline], dict[str, Array]]


@dataclass(frozen=True)
class PooledMetric:
    """A metric that pools all clients' results, whose gains a report shows.

    Attributes:
        name: the metric's.
        number: as of ``metrics.worth.pooled_gains``.
        columns: what it takes of a model's ``Results``.
        lower: whether a lower value is better.
    """

    name: str
    number: Callable[..., Pooled]
    columns: Callable[[Any], tuple[Any, ...]]
    lower: bool = False


def share_of_right(name: str) -> PooledMetric:
    """Return the share of right answers as a pooled metric."""
    return PooledMetric(name, mean_pooled, _right)


def _right(results: Any) -> tuple[Array]:
    return (results.right.astype(np.float64),)


def _most_used(labels: Array) -> float:
    return int(np.bincount(labels).argmax())


@dataclass(frozen=True, kw_only=True)
class Trait:
    """What a user is known by, from its training labels.

    Attributes:
        name: for captions.
        continuous: whether it is a number.
        of: from labels, at least one; of classes it is the number of one.
    """

    name: str = "most-used label"
    continuous: bool = False
    of: Callable[[Array], float] = _most_used


def _any_output(output: Tensor, label: Tensor) -> None:
    """Check nothing of a model's output."""


def _any_labels(label: Array, columns: Mapping[str, Any], classes: int | None) -> None:
    """Check nothing of labels."""


def classes_in(label: Array) -> int:
    """Return how many classes there are at least, by the largest label."""
    return max(1, int(label.max()) + 1)


def width(label: Array) -> int:
    """Return how many values each example has as its label."""
    return int(label.shape[1])


def check_width(label: Array, columns: Mapping[str, Any], classes: int | None) -> None:
    """Raise DataError unless each example has as many values as its label as were said."""
    if classes is not None and classes != label.shape[1]:
        raise DataError(
            "Wanted {wanted} labels for each example, as meta['classes'] says; got {got}.",
            wanted=classes,
            got=label.shape[1],
        )


def as_many_values(classes: int) -> int:
    """Return the number of classes: a label is one of them."""
    return classes


def _as_it_is(output: Tensor) -> Tensor:
    return output


def _no_fault(score: Tensor) -> str:
    return ""


def _right_of(loss: Array, right: Array) -> Array:
    return right


def _mean_of(truth: Array, label: Array) -> float:
    return float(truth.mean())


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of task. A result is what judging gives for each label: of several labels of an example each has its own.

    Attributes:
        name: in ``meta["task"]``, records and configurations.
        loss: the loss that fits, as in ``method.loss.kind``.
        axes: a label's axes, 2 where an example has several labels in a row, 3 where each pixel has one.
        classes_last: brings a model's output to a tensor whose last axis is the classes, and the others a label's.
        whole: whether labels are integers; else they are numbers.
        has_classes: whether a label is a class, so that ``metrics.CLASS_METRICS`` are defined.
        one_class: whether an example has one label, which is a class; else ``unlike_classes`` says what labels are.
        where: after its name, which labels are of it: "where each token has a label".
        several: whether an example has a row of labels, with an output and a result of its own each.
        row: the name of the kind where an example has a row of such labels; None: there is none.
        candidates: whether an example's outputs are scores of the items that its column ``item`` lists.
        errors: whether scores are predicted − true, so that of several labels an example the RMSE of each is told.
        ignored: a label that does not count.
        close: whether labels must be numbered closely where nobody says how many classes there are.
        size: from labels the size of a model's output, ``meta["classes"]``.
        values: from that size how many values a label can have; None: any.
        check_labels: raises DataError where labels (examples, …), the data's columns and the number of classes do not fit.
        check_output: raises MethodError where a model's output does not fit the labels.
        judge: the results of outputs and labels.
        right: from scores and labels whether answers are right; None where there is no right or wrong.
        right_name: the name of the share of right answers.
        gain: from scores and labels a number of at least 0 a result, whose mean a metric is made of.
        metrics: the metrics, by name, in the order of records.
        shown: the metrics that only this kind has or that have words of their own.
        headline: the metric that chooses the best round.
        client_metric: the metric of each client.
        of_client: from clients' mean losses and shares of right answers the values of that metric.
        ranks_scores: whether metrics want the order of all scores, so that tallies hold bins of them.
        score_fault: says what is wrong with scores that came from a device; empty where nothing is.
        kept_score, kept_label: how a run keeps results: the type of scores, and whether labels stand beside them.
        best: from what a generator knew of examples and the labels the best possible result.
        in_deviations: whether results of standardised labels stay so: outputs with units of their own have no sum.
        counting: the reference that learns nothing; None: there is none.
        pooled: the gains that a report shows.
        loss_words, loss_unit, loss_name: what the loss is called on a page, gains in it are counted in, and CSV files name it.
        trait: what a user is known by.
        says: from outputs (rows, …) and names of classes what ``fedkeep predict`` says; None: it can't.
        from_table: whether a table's reader takes it.
        standardised: whether labels that are numbers can be learned in standard deviations from their mean.
    """

    name: str
    loss: str = "cross_entropy"
    axes: int = 1
    classes_last: Callable[[Tensor], Tensor] = _as_it_is
    whole: bool = True
    has_classes: bool = True
    one_class: bool = False
    unlike_classes: str = ""
    where: str
    several: bool = False
    row: str | None = None
    candidates: bool = False
    errors: bool = False
    ignored: int | None = None
    close: bool = True
    size: Callable[[Array], int] = classes_in
    values: Callable[[int], int | None] = as_many_values
    check_labels: Callable[[Array, Mapping[str, Any], int | None], None] = _any_labels
    check_output: Callable[[Tensor, Tensor], None] = _any_output
    judge: Judge
    right: Callable[[Array, Array], Array] | None
    right_name: str = "accuracy"
    gain: Callable[[Array, Array], Array] | None = None
    metrics: Callable[[Means], dict[str, float]]
    shown: tuple[Metric, ...]
    headline: Metric
    client_metric: str = "accuracy"
    of_client: Callable[[Array, Array], Array] = _right_of
    ranks_scores: bool = False
    score_fault: Callable[[Tensor], str] = _no_fault
    kept_score: type[np.generic]
    kept_label: bool = False
    best: Callable[[Array, Array], float] = _mean_of
    in_deviations: bool = False
    counting: Counting | None
    pooled: tuple[PooledMetric, ...]
    loss_words: str = "Loss"
    loss_unit: str = "nats"
    loss_name: str = "loss"
    trait: Trait = Trait()
    says: Callable[[Tensor, Sequence[str]], list[Said]] | None = None
    from_table: bool = False
    standardised: bool = True

    @property
    def sets(self) -> bool:
        """Whether an example's label is a set of names: of several labels each is there or not."""
        return self.several and self.whole

    @property
    def compared_by(self) -> str:
        """What models are compared by where nobody names it: ``accuracy``, or ``loss`` where nothing is right or wrong."""
        return "loss" if self.right is None else "accuracy"

    @property
    def keeps_classes(self) -> bool:
        """Whether labels and predicted classes are kept beside the results where ``run.metrics`` wants them."""
        return self.has_classes and not self.kept_label


@dataclass(frozen=True)
class Task:
    """What is predicted: a kind of task, and where label and output are found."""

    kind: Kind
    label: str = "label"
    name: str | None = None
    units: tuple[Any, Any] | None = field(default=None, compare=False)
    """Mean and scale of labels that the data hold standardised, of several outputs a list of each; None: they are as they
    were read."""

    def in_units(self, values: Numbers) -> Numbers:
        """Return outputs or labels in the units that labels were read in."""
        if self.units is None:
            return values
        mean, scale = self.units
        if isinstance(mean, list):
            as_values: Any = values.new_tensor if isinstance(values, Tensor) else np.asarray
            mean, scale = (as_values(each, dtype=values.dtype) for each in (mean, scale))
        found: Numbers = values * scale + mean
        return found

    def judged(self, values: Numbers) -> Numbers:
        """Return outputs or labels as errors are counted in: in their units, unless the kind counts in deviations."""
        return values if self.kind.in_deviations else self.in_units(values)

    def metric(self, base: str) -> str:
        """Return the metric's name, with the task's name where there are several."""
        return base if self.name is None else f"{base}/{self.name}"

    @property
    def headline(self) -> str:
        """The name of the metric that chooses the best round."""
        return self.metric(self.kind.headline.name)

    @property
    def client_metric(self) -> str:
        """The name of the metric of each client."""
        return self.metric(self.kind.client_metric)
