"""A bag of words with a private user vector: a light text encoder in the place of the document model's BiLSTM."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.models.personal import PersonalClassifier
from fedkeep.nn.operation import functorch_active


class BagOfWords(PersonalClassifier):
    """Word embeddings summed and divided by √length → concat(text vector, user vector) → MLP → logits.

    Args:
        vocabulary: number of word ids; 0 is padding.
        classes, user_dim, mlp, user_bias: as for ``DocumentModel``.
        embedding_dim: length of a word's embedding and of the text vector.
    """

    lookup: ClassVar = {"embedding.weight": "text"}

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        user_dim: int = 32,
        *,
        embedding_dim: int = 64,
        mlp: int = 128,
        user_bias: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, embedding_dim, mode="sum")
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.add_personal_part(embedding_dim, classes, user_dim, mlp, user_bias)

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return logits, shape (B, classes), for word ids (B, L), padded with 0, and lengths (B,) from 1 on."""
        return self.head(self.features(text, text_length))

    def features(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return text vectors joined with the user's, shape (B, embedding_dim + user_dim)."""
        inside = torch.arange(text.shape[1], device=text.device) < text_length.unsqueeze(1)  # (B, L)
        if functorch_active():  # words of many clients side by side cannot be packed: their number differs
            words = F.embedding(text, self.embedding.weight)
            vector = (inside.to(words.dtype).unsqueeze(1) @ words).squeeze(1)
        else:
            starts = text_length.cumsum(0) - text_length
            vector = self.embedding(text[inside], starts)  # padding costs nothing
        vector = vector / text_length.to(vector.dtype).sqrt().unsqueeze(1)
        return self.with_user(vector)
