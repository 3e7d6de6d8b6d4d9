"""Accuracy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedkeep.core.errors import DataError, NonFiniteError


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
