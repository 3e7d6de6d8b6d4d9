"""Models in two steps, ``features`` and ``head``, for methods that look between them; and methods' plain references."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn


class Parts(nn.Module):
    """x → encoder → tanh → classifier."""

    def __init__(self, features: int = 3, width: int = 4, labels: int = 3, seed: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoder = nn.Linear(features, width)
            self.classifier = nn.Linear(width, labels)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoder(x))

    def head(self, features: Tensor) -> Tensor:
        out: Tensor = self.classifier(features)
        return out


class Words(Parts):
    """Word ids → mean of their vectors → encoder → tanh → classifier."""

    lookup: ClassVar = {"embedding.weight": "text"}

    def __init__(self, vocabulary: int = 300, dim: int = 5, width: int = 4, labels: int = 3) -> None:
        super().__init__(dim, width, labels)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embedding = nn.Embedding(vocabulary, dim, padding_idx=0)

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        return self.head(self.features(text, text_length))

    def features(self, text: Tensor, text_length: Tensor) -> Tensor:  # type: ignore[override]
        inside = torch.arange(text.shape[1]) < text_length.unsqueeze(1)
        words = nn.functional.embedding(text, self.embedding.weight) * inside.unsqueeze(-1)
        return super().features(words.sum(1) / text_length.unsqueeze(1))
