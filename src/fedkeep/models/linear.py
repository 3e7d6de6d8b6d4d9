"""A linear model with a private user bias: the smallest personalised model, for tests and first steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedkeep.models.outputs import outputs


class Linear(nn.Module):
    """logits = W x + b + user.

    Args:
        features: entries of ``x``.
        classes: number of labels, 1 for regression; ``user`` has as many entries.
    """

    per_example = ("user",)

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)
        self.user = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (B, classes), or predictions (B,) for regression, for x of shape (B, features)."""
        return outputs(self.linear(x) + self.user)
