"""The area under the ROC curve: judging asks for it in every round, and generators for the best possible one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedkeep.core.errors import DataError, NonFiniteError

BINS = 256
"""Bins of a binary score, the logit: 1/8 wide from −16 to 16; the outer two have no other end."""
Numbers = Tensor | np.ndarray[Any, Any] | Sequence[float]


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
    scores, labels = floats(score), floats(label)
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


def floats(values: Numbers) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers as a float64 array; a tensor's may be of types that NumPy lacks, such as bfloat16."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def bin_of(score: np.ndarray) -> np.ndarray:
    """Return each score's bin, 0 .. BINS − 1."""
    if np.isnan(score).any():
        raise NonFiniteError("auc: a score is NaN. Lower the learning rate or set clip_norm.")
    end = BINS // 16  # 16
    found: np.ndarray = (
        np.floor(8 * np.clip(score, -end, end)).clip(max=8 * end - 1).astype(np.int64) + 8 * end
    )
    return found


def binned_auc(positive: np.ndarray, negative: np.ndarray) -> tuple[float, float]:
    """Return the AUC of binned scores, ties counted half, and the most that it can differ from the exact one.

    Pairs in one bin count half, and each is worth 0 to 1, so the error is at most ½ Σ_b pos_b neg_b / (P N).

    Args:
        positive, negative: (bins,) examples of either label by bin, bins in ascending order of the score.

    Returns:
        Both NaN where there is no pair to compare.
    """
    pairs = int(positive.sum()) * int(negative.sum())
    if not pairs:
        return math.nan, math.nan
    below = np.cumsum(negative) - negative
    tied = int((positive * negative).sum())
    return (2 * int((positive * below).sum()) + tied) / (2 * pairs), tied / (2 * pairs)
