"""Accuracy, AUC and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import DataError, NonFiniteError
from fedkeep.core.params import nbytes

Numbers = Tensor | np.ndarray[Any, Any] | Sequence[float]


def accuracy(logits: Tensor, label: Tensor, weight: Tensor | None = None) -> float:
    """Return the weighted fraction of examples whose highest logit is the label's.

    Args:
        logits: (B, classes); a tie goes to the lower class.
        label: (B,) integers.
        weight: (B,) not negative, 0 for padding; None means 1 for each.

    Returns:
        A fraction; NaN where the weights sum to 0 (no example).

    Raises:
        DataError: the shapes don't fit.
        NonFiniteError: a logit of positive weight is NaN.
    """
    if (
        logits.ndim != 2
        or label.shape != logits.shape[:1]
        or (weight is not None and weight.shape != label.shape)
    ):
        got = (
            f"{tuple(logits.shape)}, {tuple(label.shape)}, {None if weight is None else tuple(weight.shape)}"
        )
        raise DataError(f"accuracy wants logits (B, classes), label (B,) and weight (B,) or None; got {got}.")
    weights = torch.ones_like(label, dtype=torch.float64) if weight is None else weight.to(torch.float64)
    total = float(weights.sum())
    if total == 0:
        return math.nan
    if bool(torch.isnan(logits).any(1).logical_and(weights > 0).any()):
        raise NonFiniteError("accuracy: a logit is NaN. Lower the learning rate or set clip_norm.")
    hit = logits.argmax(1) == label
    return float((hit * weights).sum()) / total


def auc(score: Numbers, label: Numbers) -> float:
    """Return the area under the ROC curve: the chance that a positive example scores above a negative one.

    Exact, by ranks: AUC = (Σ ranks of positives − P(P+1)/2) / (P·N); tied scores count half.

    Args:
        score: (B,) any real numbers; only their order matters.
        label: (B,) of 0 and 1.

    Returns:
        A fraction; NaN where all labels are the same (there is no pair to compare) or there is no example.

    Raises:
        DataError: the shapes differ or a label is neither 0 nor 1.
        NonFiniteError: a score is NaN.
    """
    scores, labels = _array(score), _array(label)
    if scores.ndim != 1 or scores.shape != labels.shape:
        raise DataError(f"auc wants score and label of shape (B,); got {scores.shape} and {labels.shape}.")
    if not np.isin(labels, (0.0, 1.0)).all():
        raise DataError(f"auc wants labels 0 and 1; got {np.unique(labels)[:5].tolist()}.")
    if np.isnan(scores).any():
        raise NonFiniteError("auc: a score is NaN. Lower the learning rate or set clip_norm.")
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return math.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    rank = (below + (counts + 1) / 2)[place]  # (B,) mean rank of the tied scores, from 1
    return float((rank[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def traffic(params: Mapping[str, Tensor]) -> int:
    """Return the bytes that the values of ``params`` take on the wire, names and headers not counted."""
    return nbytes(params)


def _array(values: Numbers) -> np.ndarray[Any, np.dtype[np.float64]]:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
