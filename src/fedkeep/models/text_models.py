"""Text classifiers, those with a private user vector among them, and a form of these for several tasks.

Sources: FURL's document model, §4.1 and Figure 1; layer sizes are not given there, these are ours. §6 names one user
vector for several tasks as future work; L_i = Σ_τ ω_τ L_τ(f_τ(x; w_f^τ, e_i)).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.core.declared import declare
from fedkeep.core.errors import ConfigError, check_choice, check_range
from fedkeep.models.linear import outputs
from fedkeep.nn import GRU, LSTM
from fedkeep.nn.operation import functorch_active


class PersonalClassifier(nn.Module):
    """concat(text vector, user vector) → MLP → logits (+ user bias); a subclass gives the text vector.

    ``user`` (user_dim,) and ``user_bias`` (classes,) may carry a leading example axis.
    """

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
        declare(self, per_example=[n for n in ("user", "user_bias") if hasattr(self, n)])

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


class MultiTaskDocument(nn.Module):
    """A document model per task with federated parameters of its own, and one private vector ``user`` for all.

    Args:
        vocabulary: number of character ids.
        tasks: number of classes by task name; 1 for regression.
        user_dim: length of the shared user vector.
        options: further arguments of each ``DocumentModel``.
    """

    def __init__(
        self, vocabulary: int, tasks: Mapping[str, int], user_dim: int = 32, **options: object
    ) -> None:
        super().__init__()
        if not tasks:
            raise ConfigError("MultiTaskDocument needs at least one task.")
        self.user = nn.Parameter(torch.zeros(user_dim))
        self.tasks = nn.ModuleDict()
        for name, classes in tasks.items():
            model = DocumentModel(vocabulary, classes, user_dim, **options)  # type: ignore[arg-type]
            del model.user
            self.tasks[name] = model
        declare(self, per_example=("user",))

    def forward(self, text: Tensor, text_length: Tensor) -> dict[str, Tensor]:
        """Return logits by task, each (B, classes of the task), or predictions (B,) for regression."""
        out = {}
        for name, model in self.tasks.items():
            vector = model.features(text, text_length)  # type: ignore[operator]
            joined = torch.cat([vector, self.user.expand(vector.shape[0], -1)], 1)
            out[name] = model.head(joined)  # type: ignore[operator]
        return out


class BagOfWords(PersonalClassifier):
    """Word embeddings summed and divided by √length → concat(text vector, user vector) → MLP → logits.

    Args:
        vocabulary: number of word ids; 0 is padding.
        classes, user_dim, mlp, user_bias: as for ``DocumentModel``.
        embedding_dim: length of a word's embedding and of the text vector.
    """

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
        declare(self, lookup={"embedding.weight": "text"})

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
        check_range("[0, 1)", dropout=dropout, word_dropout=word_dropout)
        check_range("[1, inf]", mean_over=mean_over)
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
        declare(self, lookup={"embedding.weight": "text"})

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
