"""The best result that any model can reach on generated data, from the generating probabilities."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedkeep.data.columns import Column, Ragged, Rows


def best_possible(columns: Mapping[str, Column], rows: Rows, task: str) -> dict[str, float | None]:
    """Return ``best`` and ``best_global`` over these rows: with the user known, and without.

    The columns ``_best`` and ``_best_global`` hold what the generator knew of every example: for a multiclass
    task the probability of its most probable label (their mean is the Bayes accuracy), for a binary task the
    probability of label 1 (their AUC against the drawn labels is the best one).
    """
    label = columns["label"]
    found: dict[str, float | None] = {"best": None, "best_global": None}
    for name in found:
        truth = columns.get(f"_{name}")
        if truth is None or isinstance(truth, Ragged) or isinstance(label, Ragged) or not len(rows):
            continue
        found[name] = auc(truth[rows], label[rows]) if task == "binary" else float(truth[rows].mean())
    return found


def auc(score: NDArray[np.float64], label: NDArray[np.int64]) -> float | None:
    """Return the area under the ROC curve: the chance that a positive scores above a negative, ties half.

    None where one of the two classes is absent.
    """
    positive = int((label == 1).sum())
    negative = len(label) - positive
    if not positive or not negative:
        return None
    _, rank, size = np.unique(score, return_inverse=True, return_counts=True)
    middle = np.cumsum(size) - (size - 1) / 2  # mean rank of each group of ties, from 1
    above = middle[rank][label == 1].sum() - positive * (positive + 1) / 2
    return float(above / (positive * negative))
