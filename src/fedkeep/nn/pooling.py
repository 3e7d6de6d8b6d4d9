"""Pooling over time that leaves padding out."""

from __future__ import annotations

import torch
from torch import Tensor

# What is wanted of a layer: all outputs and the last, or one vector per sequence.
OUTPUT, LAST, MEAN, MAX = -1, 0, 1, 2


def masked_mean(x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The mean over each sequence's own steps.

    Args:
        x: (B, L, C); finite also past a sequence's length.
        lengths: (B,) int64 from 1 to L; None: all L.

    Returns:
        (B, C).
    """
    if lengths is None:
        return x.mean(1)
    inside = _inside(x, lengths).to(x.dtype).unsqueeze(1)  # (B, 1, L)
    return (inside @ x).squeeze(1) / lengths.to(x).unsqueeze(-1)  # a product reads x once and copies nothing


def masked_max(x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The maximum over each sequence's own steps; of equal values the gradient goes to the first.

    Shapes are those of ``masked_mean``.
    """
    if lengths is not None:
        x = torch.where(_inside(x, lengths).unsqueeze(-1), x, -torch.inf)
    return x.max(1).values


def _inside(x: Tensor, lengths: Tensor) -> Tensor:
    steps = torch.arange(x.shape[1], device=x.device)
    return steps < lengths.to(x.device).unsqueeze(-1)  # (B, L)
