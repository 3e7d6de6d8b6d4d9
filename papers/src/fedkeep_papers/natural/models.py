"""A small network that predicts the next character, with a private vector of the role that speaks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedkeep


class NextCharacter(nn.Module):
    """concat(embeddings of the characters before, user) → linear, ReLU → linear (+ user_bias) → logits.

    The feed-forward network of Bengio et al., "A Neural Probabilistic Language Model", JMLR 3, 2003, on characters: on
    a CPU it takes a tenth of the time of the recurrent one in LEAF. ``user`` and ``user_bias`` may carry a leading axis
    of examples.

    Args:
        classes: number of characters.
        width: how many characters stand before.
        embedding_dim: length of a character's vector.
        hidden: units of the hidden layer.
        user_dim: length of the private vector.
    """

    def __init__(
        self, classes: int, *, width: int = 16, embedding_dim: int = 8, hidden: int = 128, user_dim: int = 8
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding_dim)
        self.body = nn.Linear(width * embedding_dim + user_dim, hidden)
        self.head = nn.Linear(hidden, classes)
        self.user = nn.Parameter(torch.zeros(user_dim))
        self.user_bias = nn.Parameter(torch.zeros(classes))
        fedkeep.declare(self, per_example=("user", "user_bias"))

    def forward(self, text: Tensor) -> Tensor:
        """Return logits, shape (B, classes), for the numbers of the characters before, (B, width) integers."""
        before = self.embedding(text.long()).flatten(1)
        joined = torch.cat([before, self.user.expand(len(before), -1)], 1)
        logits: Tensor = self.head(torch.relu(self.body(joined))) + self.user_bias
        return logits
