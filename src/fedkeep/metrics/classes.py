"""Metrics of classes that count a rare class as much as a frequent one: balanced accuracy and macro-F1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedkeep.core.errors import DataError

Classes = Tensor | np.ndarray[Any, Any] | Sequence[int]
Ints = np.ndarray[Any, np.dtype[np.int64]]


def balanced_accuracy(label: Classes, predicted: Classes) -> float:
    """Return the mean recall of the classes that are a label of some example.

    As scikit-learn's ``balanced_accuracy_score``. A class that is predicted alone, of no example, has no recall.

    Args:
        label: (examples,) classes from 0.
        predicted: (examples,) the predicted classes; below 0: none, which is wrong.

    Returns:
        A fraction; NaN without examples.

    Raises:
        DataError: shapes differ, or a label is below 0.
    """
    hits, labels, _ = _counts(label, predicted)
    some = labels > 0
    return float(np.mean(hits[some] / labels[some])) if some.any() else math.nan


def macro_f1(label: Classes, predicted: Classes) -> float:
    """Return the mean F1 = 2 TP / (2 TP + FP + FN) of the classes that occur, as a label or as a prediction.

    As scikit-learn's ``f1_score(average="macro", zero_division=0)``. A class that is never predicted, or is predicted
    and never a label, has F1 0; one that is neither does not count.

    Args:
        label, predicted: as of ``balanced_accuracy``.

    Returns:
        A fraction; NaN without examples.

    Raises:
        DataError: as of ``balanced_accuracy``.
    """
    hits, labels, predictions = _counts(label, predicted)
    return float(np.mean(2 * hits / (labels + predictions))) if len(hits) else math.nan


CLASS_METRICS: Mapping[str, Callable[[Classes, Classes], float]] = {
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
}
"""Metrics of labels and predicted classes, by name."""


def _counts(label: Classes, predicted: Classes) -> tuple[Ints, Ints, Ints]:
    """Return for each class that occurs its right answers, labels and predictions."""
    true, guess = np.asarray(label), np.asarray(predicted)
    if true.ndim != 1 or true.shape != guess.shape:
        raise DataError(f"Wanted labels and predictions as (examples,); got {true.shape} and {guess.shape}.")
    if len(true) and true.min() < 0:
        raise DataError(f"Wanted classes from 0 as labels; got {true.min()}.")
    known = guess >= 0
    classes = np.unique(np.concatenate([true, guess[known]]))

    def counted(of: np.ndarray[Any, Any]) -> Ints:
        return np.bincount(np.searchsorted(classes, of), minlength=len(classes)).astype(np.int64)

    return counted(true[true == guess]), counted(true), counted(guess[known])
