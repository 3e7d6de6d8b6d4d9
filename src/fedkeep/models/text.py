"""A text classifier: word embedding, bidirectional GRU, the mean over words, and a small classifier."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fedkeep.nn import GRU


class TextClassifier(nn.Module):
    """Embedding → BiGRU → mean over the text's own words → two-layer ReLU classifier → logits.

    Source: KTEPS (arXiv 2107.11956), §3.1 and §5.2, "Embedding–BiRNN–MLP", eq. 1–4: h_l = BiGRU(E[x_l]),
    h̄ = (1/L) Σ_l h_l, g = C(h̄). The width of the classifier's hidden layer is not given there; 2·hidden is taken.
    The names of its parts, for patterns: ``embedding.*``, ``encoder.*``, ``classifier.*``.

    Args:
        vocabulary: number of word ids; 0 is padding, whose row is zero and never read, so it stays zero.
        classes: number of labels.
        embedding_dim: d, length of a word's vector.
        hidden: GRU units per direction; features have 2·hidden entries.
        mlp: hidden units of the classifier; None: 2·hidden.
    """

    lookup: ClassVar = {"embedding.weight": "text"}

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        embedding_dim: int = 200,
        hidden: int = 64,
        mlp: int | None = None,
    ) -> None:
        super().__init__()
        width = 2 * hidden
        self.embedding = nn.Embedding(vocabulary, embedding_dim)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        with torch.no_grad():
            self.embedding.weight[0] = 0.0
        self.encoder = GRU(embedding_dim, hidden, bidirectional=True)
        self.classifier = nn.Sequential(
            nn.Linear(width, mlp or width), nn.ReLU(), nn.Linear(mlp or width, classes)
        )

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return logits, shape (B, classes).

        Args:
            text: (B, L) word ids; what stands behind a text's end is not read.
            text_length: (B,) int64 numbers of words, at least 1.
        """
        return self.head(self.features(text, text_length))

    def features(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return h̄, the mean of the BiGRU's outputs over each text's own words, shape (B, 2·hidden)."""
        return self.encoder.pooled_ids(text, self.embedding.weight, text_length, how="mean")

    def head(self, features: Tensor) -> Tensor:
        """Return logits for features h̄, shape (B, classes)."""
        logits: Tensor = self.classifier(features)
        return logits
