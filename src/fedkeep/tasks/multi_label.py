"""The task ``multi_label``: any of several labels for each example, a row of 0 and 1; each of them is a result.

Micro-averaged metrics pool all labels of all examples, as scikit-learn's ``average="micro"``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.metrics.worth.pooled_gains import Pooled, auc_pooled
from fedkeep.tasks.binary import no_nan, right_sign, scores_and_labels
from fedkeep.tasks.kind import (
    ACCURACY,
    ACCURACY_USER_MEAN,
    AUC,
    Array,
    Baseline,
    Counting,
    Kind,
    Means,
    Metric,
    PooledMetric,
    Said,
    Trait,
    check_width,
    own_means,
    share_of_right,
    width,
)
from fedkeep.tasks.multiclass import class_metrics, names_of, short

MICRO_F1 = Metric(name="micro_f1", words="Micro-F1", fraction=True)


def check_labels(output: Tensor, label: Tensor) -> None:
    """Raise MethodError unless the model gave a logit for each label."""
    if output.shape != label.shape:
        raise MethodError(
            "Several labels want logits of shape (B, labels), {wanted}; the model gave {got}. Let its last layer have "
            "one output for each label.",
            wanted=tuple(label.shape),
            got=tuple(output.shape),
        )


def _yes_or_no(classes: int) -> int:
    return 2


def _judge(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor, None]:
    loss = nn.functional.binary_cross_entropy_with_logits(output, label.to(output.dtype), reduction="none")
    return loss, output, None


def _found(score: Array, label: Array) -> Array:
    """Return 1 where a label is there and was predicted."""
    return ((score > 0) & (label > 0)).astype(np.float64)


def _metrics(means: Means) -> dict[str, float]:
    both = 2 * means.gain + 1 - means.right
    return class_metrics(means) | {"micro_f1": 2 * means.gain / both if both else math.nan} | dict(means.auc)


def micro_f1_pooled(client: Array, found: Array, wrong: Array) -> Pooled:
    """Return 2 TP / (2 TP + FP + FN) over all results, and without each client in turn.

    Args:
        client: (n,) each result's client, 0 .. K − 1.
        found: (n,) whether a label is there and was predicted.
        wrong: (n,) whether the answer is wrong.
    """
    hits, misses = 2.0 * np.bincount(client, found), np.bincount(client, wrong)
    left, rest = hits.sum() - hits, misses.sum() - misses
    every = left + rest
    without = np.divide(left, every, out=np.full(len(hits), np.nan), where=every > 0)
    whole = hits.sum() + misses.sum()
    return (float(hits.sum() / whole) if whole else math.nan), without


def _hits_and_misses(results: Any) -> tuple[Array, Array]:
    return _found(results.score, results.label), (~results.right).astype(np.float64)


def _shares(known: Baseline) -> dict[str, Array]:
    """Return what each client's share of examples with a label makes of it, towards that of all clients."""
    mine = own_means(known, (known.label.sum(0) + 1) / (len(known.label) + 2))
    return {
        "loss": -np.where(known.true > 0, np.log(mine), np.log1p(-mine)),
        "score": np.log(mine) - np.log1p(-mine),
    }


def _says_labels(output: Tensor, names: Sequence[str]) -> list[Said]:
    """Return each row's labels of a probability above one half, and the probabilities of all, by name."""
    labels = names_of(names, output.shape[1])
    return [
        (
            [name for name, score in zip(labels, scores, strict=True) if score > 0],
            dict(zip(labels, map(short, row), strict=True)),
        )
        for scores, row in zip(output.tolist(), output.float().sigmoid().numpy(), strict=True)
    ]


MULTI_LABEL = Kind(
    name="multi_label",
    loss="binary_cross_entropy",
    axes=2,
    has_classes=False,
    unlike_classes="several for each example, yes or no",
    where="where each example has a row of 0 and 1",
    several=True,
    close=False,
    size=width,
    values=_yes_or_no,
    check_labels=check_width,
    check_output=check_labels,
    judge=_judge,
    right=right_sign,
    gain=_found,
    metrics=_metrics,
    shown=(ACCURACY, ACCURACY_USER_MEAN, MICRO_F1, AUC),
    headline=MICRO_F1,
    ranks_scores=True,
    score_fault=no_nan,
    kept_score=np.float64,
    kept_label=True,
    counting=Counting(found=_shares),
    pooled=(
        share_of_right("accuracy"),
        PooledMetric("micro_f1", micro_f1_pooled, _hits_and_misses),
        PooledMetric("auc", auc_pooled, scores_and_labels),
    ),
    trait=Trait(name="share of positive labels", continuous=True, of=np.mean),
    says=_says_labels,
    from_table=True,
)
"""Any of several labels for each example."""
