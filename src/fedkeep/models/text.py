"""A text classifier: word embedding, bidirectional GRU, the mean over words, and a small classifier."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fedkeep.core.errors import ConfigError
from fedkeep.models.outputs import outputs
from fedkeep.nn import GRU


class TextClassifier(nn.Module):
    """Embedding → BiGRU → mean over the text's own words → two-layer ReLU classifier → logits.

    Source: KTEPS (arXiv 2107.11956), §3.1 and §5.2, "Embedding–BiRNN–MLP", eq. 1–4: h_l = BiGRU(E[x_l]),
    h̄ = (1/L) Σ_l h_l, g = C(h̄). The width of the classifier's hidden layer is not given there; 2·hidden is taken.
    The names of its parts, for patterns: ``embedding.*``, ``encoder.*``, ``classifier.*``.

    Args:
        vocabulary: number of word ids; 0 is padding, whose row is zero and never read, so it stays zero.
        classes: number of labels; 1 for regression, and outputs are then predictions (B,) in place of logits.
        embedding_dim: d, length of a word's vector.
        hidden: GRU units per direction; features have 2·hidden entries.
        mlp: hidden units of the classifier; None: 2·hidden.
        dropout: probability of dropping an entry of what ``head`` is given, while training.
        mean_over: what h̄'s sum is divided by: None: by the text's own number of words; a number, the length to which
            texts are padded: by it, as if the padding's h_l were zeros (KTEPS says "along the sequential dimension").
        word_dropout: probability of leaving a word out of its text, while training; one word always stays.
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
        dropout: float = 0.0,
        word_dropout: float = 0.0,
        mean_over: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("dropout", dropout), ("word_dropout", word_dropout)):
            if not 0 <= value < 1:
                raise ConfigError("{name} must be in [0, 1); got {got}.", name=name, got=value)
        if mean_over is not None and mean_over < 1:
            raise ConfigError("mean_over must be at least 1, or None; got {got}.", got=mean_over)
        width = 2 * hidden
        self.embedding = nn.Embedding(vocabulary, embedding_dim)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        with torch.no_grad():
            self.embedding.weight[0] = 0.0
        self.encoder = GRU(embedding_dim, hidden, bidirectional=True)
        self.classifier = nn.Sequential(
            nn.Linear(width, mlp or width), nn.ReLU(), nn.Linear(mlp or width, classes)
        )
        self.dropout, self.word_dropout, self.mean_over = dropout, word_dropout, mean_over

    def extra_repr(self) -> str:
        """Return what the layers don't show."""
        own = {n: getattr(self, n) for n in ("dropout", "word_dropout", "mean_over")}
        return ", ".join(f"{name}={value}" for name, value in own.items() if value)

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return logits, shape (B, classes), for word ids (B, L) and their numbers (B,) int64, at least 1.

        What stands behind a text's end is not read.
        """
        return self.head(self.features(text, text_length))

    def features(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return h̄, the mean of the BiGRU's outputs over each text's own words or ``mean_over``, (B, 2·hidden)."""
        if self.training and self.word_dropout:
            text, text_length = thinned(text, text_length, self.word_dropout)
        mean = self.encoder.pooled_ids(text, self.embedding.weight, text_length, how="mean")
        if self.mean_over is None:
            return mean
        return mean * (text_length / self.mean_over).to(mean.dtype).unsqueeze(1)

    def head(self, features: Tensor) -> Tensor:
        """Return logits for features h̄, shape (B, classes)."""
        if self.dropout:
            features = nn.functional.dropout(features, self.dropout, self.training)
        return outputs(self.classifier(features))


def thinned(text: Tensor, length: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Return texts (B, L) without some of their words, in their order, and their new lengths (B,), at least 1.

    A word is left out with ``probability``; where all would go, the first stays.
    """
    place = torch.arange(text.shape[1], device=text.device)
    kept = nn.functional.dropout(torch.ones(text.shape, device=text.device), probability) > 0
    keep = kept & (place < length.unsqueeze(1))
    keep = keep | ((place == 0) & ~keep.any(1, keepdim=True))
    order = (~keep).to(torch.uint8).argsort(dim=1, stable=True)
    return text.gather(1, order), keep.sum(1)
