"""The task ``binary``: yes or no for each example, the labels 1 and 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.errors import DataError
from fedkeep.metrics.scores import auc
from fedkeep.metrics.worth.pooled_gains import auc_pooled
from fedkeep.tasks.kind import (
    AUC,
    Array,
    Baseline,
    Counting,
    Kind,
    Means,
    Metric,
    PooledMetric,
    Trait,
    classes_in,
    share_of_right,
)
from fedkeep.tasks.multiclass import class_metrics, says_class, shares_of

AUC_USER_MEAN = Metric(name="auc_user_mean", words="AUC, mean over users", fraction=True)


def _check_labels(label: Array, columns: Mapping[str, Any], classes: int | None) -> None:
    largest = int(label.max(initial=0)) + 1
    if max(classes or 0, largest) > 2:
        raise DataError(
            "A binary task has the labels 0 and 1; got {got} classes. Say meta['task'] = 'multiclass', "
            "or task='multiclass' where a reader reads the data.",
            got=classes or largest,
        )


def _judge(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss = nn.functional.cross_entropy(output, label, reduction="none")
    score = output[:, 1] - output[:, 0]
    return loss, score, torch.where(score.isnan(), -1, (score > 0).long())


def right_sign(score: Array, label: Array) -> Array:
    """Return whether a score is above 0 where the label is 1, and not where it is 0; a NaN is wrong."""
    found: Array = ((score > 0) == (label > 0)) & ~np.isnan(score)
    return found


def no_nan(score: Tensor) -> str:
    """Return what is wrong with scores of which one is NaN."""
    return "holds a NaN" if bool(score.isnan().any()) else ""


def _two_classes(label: Array) -> int:
    return max(2, classes_in(label))


def scores_and_labels(results: Any) -> tuple[Array, Array]:
    """Return what an AUC takes."""
    return results.score, results.label


def _metrics(means: Means) -> dict[str, float]:
    return class_metrics(means) | dict(means.auc)


def _shares(known: Baseline) -> dict[str, Array]:
    mine, loss = shares_of(known)
    return {"loss": loss, "score": np.log(mine[:, 1]) - np.log(mine[:, 0])}


BINARY = Kind(
    name="binary",
    one_class=True,
    where="where each example is yes or no",
    size=_two_classes,
    check_labels=_check_labels,
    judge=_judge,
    right=right_sign,
    metrics=_metrics,
    shown=(AUC, AUC_USER_MEAN),
    headline=AUC,
    ranks_scores=True,
    score_fault=no_nan,
    kept_score=np.float64,
    kept_label=True,
    best=auc,
    counting=Counting(found=_shares),
    pooled=(
        share_of_right("accuracy"),
        PooledMetric("auc", auc_pooled, scores_and_labels),
    ),
    trait=Trait(name="share of positive labels", continuous=True, of=np.mean),
    says=says_class,
    from_table=True,
)
"""Yes or no for each example."""
