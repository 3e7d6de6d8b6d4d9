"""FURL's document model: characters, a bidirectional LSTM, a private user vector, an MLP.

Source: FURL, §4.1 and Figure 1; layer sizes are not given there, these are ours.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from fedkeep.core.errors import check_choice
from fedkeep.models.personal import PersonalClassifier
from fedkeep.nn import LSTM


class DocumentModel(PersonalClassifier):
    """Character embedding → BiLSTM → text vector; concat(text vector, user vector) → MLP → logits.

    Args:
        vocabulary: number of character ids; 0 is padding.
        classes: number of labels; 1 for regression, and outputs are then predictions (B,) in place of logits.
        user_dim: length of the user vector ``user`` (private in FURL); 0: no personalisation.
        embedding_dim: length of a character's embedding.
        hidden: LSTM units per direction; the text vector has 2 · hidden entries.
        mlp: hidden units of the MLP, ReLU.
        pool: the text vector: ``"last"`` (last forward ‖ last backward state), ``"max"`` or ``"mean"`` over
            characters.
        dropout: probability of dropping an entry of the MLP's input.
        user_bias: adds a private vector ``user_bias`` of shape (classes,) to the logits (user-specific weights).
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        user_dim: int = 32,
        *,
        embedding_dim: int = 32,
        hidden: int = 64,
        mlp: int = 128,
        pool: Literal["last", "max", "mean"] = "last",
        dropout: float = 0.0,
        user_bias: bool = False,
    ) -> None:
        super().__init__()
        check_choice("pool must be", pool, ("last", "max", "mean"))
        self.pool: Literal["last", "max", "mean"] = pool
        self.embedding = nn.Embedding(vocabulary, embedding_dim)
        self.lstm = LSTM(embedding_dim, hidden, bidirectional=True)
        self.add_personal_part(2 * hidden, classes, user_dim, mlp, user_bias, dropout)

    def extra_repr(self) -> str:
        """Return what the layers don't show."""
        return f"pool={self.pool}"

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return logits, shape (B, classes), for character ids (B, L), padded with 0, and lengths (B,) from 1 on."""
        return self.head(self.features(text, text_length))

    def features(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return text vectors joined with the user's, shape (B, 2 · hidden + user_dim)."""
        vector = self.lstm.pooled_ids(text, self.embedding.weight, text_length, self.pool)  # (B, 2H)
        return self.with_user(vector)
