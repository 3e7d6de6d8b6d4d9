"""Models of products of numbers: a linear one with a private user bias, and matrix factorisation.

In the factorisation a user's row is private, the items' rows are federated (FURL, §3.2 names collaborative filtering
among the models that satisfy the split constraint).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedkeep.core.declared import declare


def outputs(last: Tensor) -> Tensor:
    """Return what the last layer gave: logits (B, classes), or with one output predictions of numbers, (B,)."""
    return last.squeeze(-1) if last.shape[-1] == 1 else last


class Linear(nn.Module):
    """logits = W x + b + user.

    Args:
        features: entries of ``x``.
        classes: number of labels, 1 for regression; ``user`` has as many entries.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)
        self.user = nn.Parameter(torch.zeros(classes))
        declare(self, per_example=("user",))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (B, classes), or predictions (B,) for regression, for x of shape (B, features)."""
        return outputs(self.linear(x) + self.user)


class MatrixFactorization(nn.Module):
    """r̂ = mean + user_bias + item_bias[i] + ⟨user, item[i]⟩.

    Args:
        items: number of items.
        dim: length of a user's and an item's vector.
        mean: what the mean starts at, e.g. the middle of the scale of ratings.
    """

    def __init__(self, items: int, dim: int = 16, mean: float = 0.0) -> None:
        super().__init__()
        self.item = nn.Embedding(items, dim)
        self.item_bias = nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.tensor(float(mean)))
        self.user = nn.Parameter(torch.zeros(dim))
        self.user_bias = nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.item_bias.weight)
        declare(self, per_example=("user", "user_bias"))

    def forward(self, item: Tensor) -> Tensor:
        """Return predicted ratings, shape (B,), for item ids of shape (B,); of (B, candidates) for a ranking's ids."""
        if item.ndim == 2:  # each example's own user, or one for all, meets all candidates
            agreement = (self.item(item) * self.user.unsqueeze(-2)).sum(-1)
            scores: Tensor = self.mean + self.user_bias + self.item_bias(item).squeeze(-1) + agreement
            return scores
        agreement = (self.item(item) * self.user).sum(-1)
        rating: Tensor = self.mean + self.user_bias.squeeze(-1) + self.item_bias(item).squeeze(-1) + agreement
        return rating
