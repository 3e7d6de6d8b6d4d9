"""What text classifiers with a private user vector share: the vector, a private bias, and the MLP behind them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedkeep.models.outputs import outputs


class PersonalClassifier(nn.Module):
    """concat(text vector, user vector) → MLP → logits (+ user bias); a subclass gives the text vector.

    ``user`` (user_dim,) and ``user_bias`` (classes,) may carry a leading example axis.
    """

    per_example = ("user", "user_bias")
    mlp: nn.Sequential

    def add_personal_part(
        self, width: int, classes: int, user_dim: int, mlp: int, user_bias: bool, dropout: float = 0.0
    ) -> None:
        """Register the user's parameters and the MLP behind a text vector of ``width`` entries.

        The other arguments are those of ``DocumentModel``.
        """
        if user_dim:
            self.user = nn.Parameter(torch.zeros(user_dim))
        if user_bias:
            self.user_bias = nn.Parameter(torch.zeros(classes))
        self.mlp = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(width + user_dim, mlp), nn.ReLU(), nn.Linear(mlp, classes)
        )

    def with_user(self, vector: Tensor) -> Tensor:
        """Return text vectors (B, width) joined with the user's, shape (B, width + user_dim)."""
        user: Tensor | None = getattr(self, "user", None)
        return vector if user is None else torch.cat([vector, user.expand(vector.shape[0], -1)], 1)

    def head(self, features: Tensor) -> Tensor:
        """Return logits for features, shape (B, classes), or predictions (B,) for regression."""
        logits = features
        for layer in self.mlp:
            if not (isinstance(layer, nn.Dropout) and layer.p == 0):  # a call for nothing
                logits = layer(logits)
        bias: Tensor | None = getattr(self, "user_bias", None)
        return outputs(logits if bias is None else logits + bias)
