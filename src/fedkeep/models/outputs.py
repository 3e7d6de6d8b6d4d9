"""What a network gives: logits of classes, or one number for each example."""

from __future__ import annotations

from torch import Tensor


def outputs(last: Tensor) -> Tensor:
    """Return what the last layer gave: logits (B, classes), or with one output predictions of numbers, (B,)."""
    return last.squeeze(-1) if last.shape[-1] == 1 else last
