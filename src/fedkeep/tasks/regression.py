"""The tasks ``regression``, a number for each example, and ``multi_output``, a row of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.metrics.worth.pooled_gains import rmse_pooled
from fedkeep.tasks.kind import (
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
    width,
)
from fedkeep.tasks.multiclass import short

RMSE = Metric(name="rmse", words="RMSE", lower=True)
MAE = Metric(name="mae", words="MAE", lower=True)


def check_regression(output: Tensor, label: Tensor) -> None:
    """Raise MethodError unless the model gave one number per example, or as many as labels, (B, outputs)."""
    if output.shape != label.shape and label.dim() > 1:
        raise MethodError(
            "Several numbers an example want outputs of shape (B, outputs), {wanted}; the model gave {got}. Let its last "
            "layer have one output for each number.",
            wanted=tuple(label.shape),
            got=tuple(output.shape),
        )
    if output.shape != label.shape:
        raise MethodError(
            "Regression wants outputs of shape (B,), one per label; the model gave {got} for labels "
            "{labels}. Squeeze the last axis: out.squeeze(-1).",
            got=tuple(output.shape),
            labels=tuple(label.shape),
        )


def _judge(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor, None]:
    score = output - label.double()
    return score**2, score, None


def _absolute(score: Array, label: Array) -> Array:
    found: Array = np.abs(score)
    return found


def _one_number(label: Array) -> int:
    return 1


def _any_value(classes: int) -> None:
    return None


def _squares(results: Any) -> tuple[Array]:
    return (results.loss,)


def _root_of_loss(loss: Array, right: Array) -> Array:
    found: Array = np.sqrt(loss)
    return found


def _metrics(means: Means) -> dict[str, float]:
    return {"loss": means.loss, "rmse": math.sqrt(means.loss), "mae": means.gain}


def _mean_label(known: Baseline) -> dict[str, Array]:
    error = own_means(known, known.label.mean(0) if len(known.label) else 0.0) - known.true
    return {"loss": error**2, "score": error}


def _says_numbers(output: Tensor, names: Sequence[str]) -> list[Said]:
    numbers = [[short(v) for v in row] for row in output.reshape(len(output), -1).float().numpy()]
    return [(own[0] if len(own) == 1 else own, {}) for own in numbers]


REGRESSION = Kind(
    name="regression",
    loss="squared_error",
    whole=False,
    has_classes=False,
    where="where each example is a number",
    row="multi_output",
    errors=True,
    close=False,
    size=_one_number,
    values=_any_value,
    check_output=check_regression,
    judge=_judge,
    right=None,
    gain=_absolute,
    metrics=_metrics,
    shown=(RMSE, MAE),
    headline=RMSE,
    client_metric="rmse",
    of_client=_root_of_loss,
    kept_score=np.float64,
    counting=Counting(name="each user's mean label", found=_mean_label),
    pooled=(PooledMetric("rmse", rmse_pooled, _squares, lower=True),),
    loss_words="Squared error",
    loss_unit="in squared error",
    loss_name="squared_error",
    trait=Trait(name="mean label", continuous=True, of=np.mean),
    says=_says_numbers,
    from_table=True,
)
"""A number for each example."""


MULTI_OUTPUT = replace(
    REGRESSION,
    name="multi_output",
    axes=2,
    in_deviations=True,
    unlike_classes="several numbers for each example",
    where="where each example has a row of numbers",
    several=True,
    size=width,
    check_labels=check_width,
    counting=Counting(name="each user's mean labels", found=_mean_label),
)
"""Several numbers for each example."""
