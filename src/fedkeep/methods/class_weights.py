"""Class weights of a cross-entropy, so that examples of rare classes count more."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, raising, shown

NO_LABEL = torch.iinfo(torch.int64).min
"""A label that no example has: torch would leave out examples of label -100 without a word."""


def checked_weights(given: Iterable[float]) -> tuple[float, ...]:
    """Return class weights as a tuple.

    Raises:
        MethodError: they are no numbers, one is negative or not finite, or all are 0.
    """
    with raising(
        MethodError,
        "class_weights must be numbers, one for each class, e.g. [1.0, 20.0]; got {given!r}.",
        TypeError,
        ValueError,
        RuntimeError,
        given=given,
    ):
        if isinstance(given, str):
            raise TypeError
        weights = tuple(float(w) for w in given)
    finite = all(math.isfinite(w) and w >= 0 for w in weights)
    if not finite or not any(weights):
        raise MethodError(
            "class_weights must be {wanted}; got {got}.",
            wanted="above 0 for one class at least" if finite else "finite and at least 0",
            got=shown(list(weights)),
        )
    return weights


def class_weighted_mean(
    logits: Tensor,
    label: Tensor,
    weights: tuple[float, ...],
    smoothing: float,
    example_weight: Tensor | None,
    keep: Tensor | None,
) -> Tensor:
    """Return Σ v / Σ c[label], with v torch's cross-entropy of weighted classes; 0 where no weight is left.

    As ``torch.nn.functional.cross_entropy(logits, label, weight=c, label_smoothing=smoothing)``, which is NaN where no
    weight is left. 16-bit logits are taken as float32.

    Args:
        logits: (B, C).
        label: (B,).
        weights: c, C of them.
        smoothing: the share of the label that is spread evenly over all classes.
        example_weight: (B,), a factor of both sums.
        keep: (B,), the examples that count at all.

    Raises:
        MethodError: there are not as many weights as classes.
    """
    if len(weights) != logits.shape[1]:
        raise MethodError(
            "class_weights has {count} numbers, but the model gives logits of {classes} classes. Give "
            "one weight for each class.",
            count=len(weights),
            classes=logits.shape[1],
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_class = torch.tensor(weights, dtype=logits.dtype, device=logits.device)
    label = label if keep is None else label.clamp_min(0)
    values = nn.functional.cross_entropy(
        logits, label, of_class, ignore_index=NO_LABEL, reduction="none", label_smoothing=smoothing
    )
    counted = of_class[label]
    if keep is not None:
        values, counted = torch.where(keep, values, 0.0), torch.where(keep, counted, 0.0)
    if example_weight is not None:
        w = example_weight.to(values.dtype)
        values, counted = w * values, w * counted
    total = counted.sum()
    some = total > 0
    return torch.where(some, values.sum() / torch.where(some, total, 1.0), 0.0)
