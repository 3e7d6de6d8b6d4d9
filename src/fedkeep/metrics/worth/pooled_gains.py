"""Gains in numbers that pool all clients' examples: accuracy, RMSE, AUC, macro-F1; no client has a share in them alone.

Their intervals leave out one client at a time (jackknife). With several seeds the gain is the mean over them, and the
interval is for these trained models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.metrics.worth.gains import Array
from fedkeep.metrics.worth.intervals import Floats, Interval, jackknife

Pooled = tuple[float, Floats]
"""A number over all clients, and (K,) the same without each client in turn."""


def mean_pooled(client: Array, values: Array) -> Pooled:
    """Return the mean over all examples, e.g. accuracy.

    Args:
        client: (n,) each example's client, 0 .. K − 1.
        values: (n,).
    """
    total, own = float(values.sum()), np.bincount(client, values)
    count = np.bincount(client)
    return total / len(client), (total - own) / (len(client) - count)


def rmse_pooled(client: Array, squares: Array) -> Pooled:
    """Return the root of the mean squared error; arguments as for ``mean_pooled``."""
    whole, without = mean_pooled(client, squares)
    return float(np.sqrt(whole)), np.sqrt(np.maximum(without, 0.0))


def auc_pooled(client: Array, scores: Array, labels: Array) -> Pooled:
    """Return the area under the ROC curve; NaN where no positive and negative example is left to compare.

    Without client k the pairs of k's positives with all negatives go, and those of all positives with k's negatives;
    pairs within k then went twice.

    Args:
        client: (n,) each example's client, 0 .. K − 1.
        scores: (n,).
        labels: (n,) of 0 and 1.
    """
    people, positive = int(client.max()) + 1, labels > 0
    pos, neg = (
        np.bincount(client[positive], minlength=people),
        np.bincount(client[~positive], minlength=people),
    )
    wins = _wins(scores, positive)
    total, own = wins[positive].sum(), np.bincount(client, wins, people)
    within = np.zeros(people)
    order = np.argsort(client, kind="stable")
    for k, rows in enumerate(np.split(order, np.cumsum(np.bincount(client, minlength=people))[:-1])):
        within[k] = _wins(scores[rows], positive[rows])[positive[rows]].sum()
    pairs = (pos.sum() - pos) * (neg.sum() - neg)
    left = np.divide(total - own + within, pairs, out=np.full(people, np.nan), where=pairs > 0)
    every = int(pos.sum() * neg.sum())
    return (float(total) / every if every else float("nan")), left


def balanced_accuracy_pooled(client: Array, label: Array, predicted: Array) -> Pooled:
    """Return the mean recall of the classes that are a label, as ``metrics.balanced_accuracy``.

    Without a client it is NaN where a class is a label of no other.

    Args:
        client: (n,) each example's client, 0 .. K − 1.
        label: (n,) classes from 0.
        predicted: (n,) predicted classes; below 0: none.
    """
    return _of_classes(client, label, predicted, lambda hits, labels, _: (hits, labels), unlabelled=False)


def macro_f1_pooled(client: Array, label: Array, predicted: Array) -> Pooled:
    """Return the mean F1 of the classes that are a label or a prediction, as ``metrics.macro_f1``.

    Without a client it is NaN where a class is a label of no other. A class that is predicted and never a label counts
    with its F1, 0, without any client too.

    Args:
        client, label, predicted: as for ``balanced_accuracy_pooled``.
    """
    return _of_classes(client, label, predicted, lambda hits, labels, guesses: (2 * hits, labels + guesses))


def mean_iou_pooled(client: Array, label: Array, predicted: Array) -> Pooled:
    """Return the mean intersection over union of the classes that are a label or a prediction, as ``metrics.mean_iou``.

    Without a client as for ``macro_f1_pooled``.

    Args:
        client, label, predicted: as for ``balanced_accuracy_pooled``.
    """
    return _of_classes(
        client, label, predicted, lambda hits, labels, guesses: (hits, labels + guesses - hits)
    )


CLASSES_POOLED: Mapping[str, Callable[[Array, Array, Array], Pooled]] = {
    "balanced_accuracy": balanced_accuracy_pooled,
    "macro_f1": macro_f1_pooled,
    "mean_iou": mean_iou_pooled,
}
"""What ``metrics.CLASS_METRICS`` are without each client in turn, by name."""


def shares(number: Pooled) -> Floats:
    """Return (K,) each client's share in a pooled number: the jackknife's pseudo-values, moved so that the number is
    their mean (Tukey, 1958).

    ``intervals.users_like_these`` of them has the jackknife's variance over clients, and with several seeds what these
    add.
    """
    whole, without = number
    found: Floats = whole + (len(without) - 1) * (without.mean() - without)
    return found


def _of_classes(
    client: Array,
    label: Array,
    predicted: Array,
    fraction: Callable[..., tuple[Array, Array]],
    *,
    unlabelled: bool = True,
) -> Pooled:
    """Return the mean over classes of a fraction of right answers, labels and predictions of the class.

    Leaving out a client changes the fractions of the classes that it has alone, so that these are computed anew, and
    not all classes for every client.

    Args:
        client, label, predicted: as for ``balanced_accuracy_pooled``.
        fraction: returns numerators and denominators.
        unlabelled: whether classes count that are predicted and never a label.
    """
    people, known, right = int(client.max()) + 1, predicted >= 0, label == predicted
    classes, place = np.unique(np.concatenate([label, predicted[known]]), return_inverse=True)
    kinds = len(classes)
    own = np.concatenate([client, client[known]]).astype(np.int64) * kinds + place
    pairs, where = np.unique(own, return_inverse=True)  # of a client and a class that it has
    labels = np.bincount(where[: len(label)], minlength=len(pairs))
    guesses = np.bincount(where[len(label) :], minlength=len(pairs))
    hits = np.bincount(where[: len(label)], right, len(pairs))
    who, which = pairs // kinds, pairs % kinds
    sums = np.stack([np.bincount(which, count, kinds) for count in (hits, labels, guesses)])
    some = sums[1] > 0
    counted = (some | unlabelled)[which]

    def value(counts: Array) -> Floats:
        top, bottom = fraction(*counts)
        found: Floats = np.divide(top, bottom, out=np.zeros(top.shape), where=bottom > 0)
        return found

    whole = value(sums)
    left = sums[:, which] - np.stack([hits, labels, guesses])
    change = np.where(counted, value(left) - whole[which], 0.0)
    change[some[which] & (left[1] == 0)] = np.nan
    number = kinds if unlabelled else int(some.sum())
    total = float(whole[some | unlabelled].sum())
    return total / number, (total + np.bincount(who, change, people)) / number


def _wins(scores: Array, positive: Array) -> Floats:
    """Return for each positive how many negatives lie below it, for each negative how many positives lie above it.

    Ties count half.
    """
    low, high = np.sort(scores[~positive]), np.sort(scores[positive])
    below = (np.searchsorted(low, scores, "left") + np.searchsorted(low, scores, "right")) / 2
    above = len(high) - (np.searchsorted(high, scores, "left") + np.searchsorted(high, scores, "right")) / 2
    return np.where(positive, below, above)


def pooled_gain(
    number: Callable[..., Pooled],
    client: Array,
    ours: Sequence[tuple[Array, ...]],
    theirs: Sequence[tuple[Array, ...]],
    *,
    lower_is_better: bool = False,
) -> Interval:
    """Return the gain in a pooled number, positive where ours is better.

    It is cut at ±1, but for errors. Its ends are NaN where the number is not defined without some client, e.g. the AUC
    without the only one that has positives, and where it is the same without every client.

    Args:
        number: one of the functions above.
        client: (n,) each example's client, 0 .. K − 1; at least two clients.
        ours, theirs: for each seed the function's further arguments.
        lower_is_better: as for an error.

    Raises:
        DataError: there is one client only.
    """
    if int(client.max(initial=-1)) < 1:
        raise DataError(
            "A pooled gain's interval leaves out one client at a time; it wants two clients at least."
        )
    sign = -1.0 if lower_is_better else 1.0
    found = [(number(client, *a), number(client, *b)) for a, b in zip(ours, theirs, strict=True)]
    whole = float(np.mean([a[0] - b[0] for a, b in found]))
    without = np.mean([a[1] - b[1] for a, b in found], 0)
    i, most = jackknife(sign * whole, sign * without), math.inf if lower_is_better else 1.0
    if i.low == i.high:
        return Interval(i.mean, math.nan, math.nan)
    return Interval(i.mean, max(i.low, -most), min(i.high, most))
