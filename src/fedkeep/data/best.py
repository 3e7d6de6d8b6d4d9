"""The best result that any model can reach on generated data, from the generating probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedkeep.core.auc import auc
from fedkeep.data.columns import Column, Ragged, Rows


def best_possible(columns: Mapping[str, Column], rows: Rows, task: str) -> dict[str, float | None]:
    """Return ``best`` and ``best_global`` over these rows: with the user known, and without.

    The columns ``_best`` and ``_best_global`` hold what the generator knew of every example: for a multiclass
    task the probability of its most probable label (their mean is the Bayes accuracy), for a binary task the
    probability of label 1 (their AUC against the drawn labels is the best one), for a regression the squared error of
    the truth (the root of their mean is the best RMSE). So the best is in the metric that runs are judged by.
    """
    label = columns["label"]
    found: dict[str, float | None] = {"best": None, "best_global": None}
    for name in found:
        truth = columns.get(f"_{name}")
        if truth is None or isinstance(truth, Ragged) or isinstance(label, Ragged) or not len(rows):
            continue
        best = auc(truth[rows], label[rows]) if task == "binary" else float(truth[rows].mean())
        best = math.sqrt(best) if task == "regression" else best
        found[name] = None if math.isnan(best) else best
    return found
