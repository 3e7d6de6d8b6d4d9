"""Pooling over time that leaves padding out."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The mean over each sequence's own steps.

    Args:
        x: (B, L, C); values past a sequence's length are not read as numbers, so even NaN does no harm there.
        lengths: (B,) int64 from 1 to L; None: all L.

    Returns:
        (B, C).
    """
    if lengths is None:
        return x.mean(1)
    inside = _inside(x, lengths)
    return x.masked_fill(~inside, 0.0).sum(1) / lengths.to(x.dtype).unsqueeze(-1)


def masked_max(x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The maximum over each sequence's own steps; arguments and shapes as in ``masked_mean``."""
    if lengths is None:
        return x.amax(1)
    return x.masked_fill(~_inside(x, lengths), -torch.inf).amax(1)


def _inside(x: Tensor, lengths: Tensor) -> Tensor:
    steps = torch.arange(x.shape[1], device=x.device)
    return (steps < lengths.to(x.device).unsqueeze(-1)).unsqueeze(-1)  # (B, L, 1)
