"""The arms' models: own counts, and a linear layer over a sentence vector, which adapted last layers may make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedkeep

ON = ("*.query", "*.value")
"""The layers that have adapters."""


class Channel(nn.Module):
    """own counts + linear(sentence) + linear(user) + user_bias → logits.

    The linear layer of the sentence is zero at first, so that training begins at what was counted. Linear layers of the
    sentence and of the user are one of both side by side.

    Args:
        width: W, of a sentence vector.
        classes: C, labels.
        user_dim: length of the private vector; 0: none.
        bias: whether there is a private bias.
        last: the frozen last layers (transformers' ``BertLayer``), whose inputs are given in place of a sentence
            vector.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        *,
        user_dim: int = 0,
        bias: bool = False,
        last: nn.ModuleList | None = None,
    ) -> None:
        super().__init__()
        self.last = last
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.user_head = nn.Linear(user_dim, classes, bias=False) if user_dim else None
        self.user = nn.Parameter(torch.zeros(user_dim)) if user_dim else None
        self.user_bias = nn.Parameter(torch.zeros(classes)) if bias else None
        own = ("user", "user_bias")
        fedkeep.declare(self, per_example=[n for n in own if getattr(self, n) is not None])

    def logits(self, sentence: Tensor, own: Tensor) -> Tensor:
        """Return (B, C) for sentence vectors (B, W), brought to mean 0 and variance 1, and log shares (B, C)."""
        found: Tensor = own + self.head(F.layer_norm(sentence, sentence.shape[-1:]))
        if self.user_head is not None:
            found = found + self.user_head(self.user)
        return found if self.user_bias is None else found + self.user_bias


class OnVectors(Channel):
    """``Channel`` on cached sentence vectors."""

    def forward(self, sentence: Tensor, own: Tensor) -> Tensor:
        """Return logits (B, C) for sentence vectors (B, W) and log shares (B, C)."""
        return self.logits(sentence, own)


class OnTokens(Channel):
    """``Channel`` on what goes into the last layers; the sentence vector is the mean over tokens of what comes out."""

    def forward(self, hidden: Tensor, length: Tensor, own: Tensor) -> Tensor:
        """Return logits (B, C) for inputs of the last layers (B, T, W), tokens (B,) and log shares (B, C)."""
        assert self.last is not None
        there = torch.arange(hidden.shape[1], device=hidden.device) < length[:, None]  # (B, T)
        x = hidden.float()
        layer: Any
        for layer in self.last:
            mixed = layer.attention(x, there[:, None, None, :])[0][
                there
            ]  # (tokens, W) before the texts' ends
            x = torch.zeros_like(x).index_put((there,), layer.output(layer.intermediate(mixed), mixed))
        return self.logits(x.sum(1) / length[:, None], own)


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Attributes:
        title: for people.
        private: name patterns of what stays with the user; empty: nothing.
        shared_rank: rank of the federated adapter on queries and values; 0: none, and sentence vectors are given.
        own_rank: rank of the private adapter beside it.
        head_rank: rank of the private low-rank part of the linear layer.
        user_dim: length of the private vector.
        bias: whether there is a private bias.
        own_rate: local learning rate of what is private.
    """

    title: str
    private: tuple[str, ...] = ()
    shared_rank: int = 0
    own_rank: int = 0
    head_rank: int = 0
    user_dim: int = 0
    bias: bool = False
    own_rate: float = 0.0

    @property
    def tokens(self) -> bool:
        """Whether the model computes the last layers by itself."""
        return self.shared_rank > 0

    def model(self, width: int, classes: int, last: nn.ModuleList | None) -> nn.Module:
        """Return the model; what is drawn comes from torch's global generator."""
        kind = OnTokens if self.tokens else OnVectors
        made: nn.Module = kind(
            width, classes, user_dim=self.user_dim, bias=self.bias, last=last if self.tokens else None
        )
        train = [name for name, _ in made.named_parameters() if not name.startswith("last.")]
        steps: Sequence[tuple[int, str | tuple[str, ...], str]] = (
            (self.shared_rank, ON, "default"),
            (self.own_rank, ON, "own"),
            (self.head_rank, "head", "own"),
        )
        for rank, on, name in steps:
            if rank:
                made = fedkeep.adapters(made, rank, on, train=train, name=name)
                train = [n for n, p in made.named_parameters() if p.requires_grad]
        return made
