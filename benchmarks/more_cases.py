"""More models as users bring them: nine in plain PyTorch, and eight of ``tests/strangers``, each with more clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.costs import Columns, attention, signals
from benchmarks.own_cases import CASES, Case, noise, resnet, words
from benchmarks.workloads import OWN, Workload
from fedkeep import FederatedData
from tests.strangers import modules
from tests.strangers.modules import STRANGERS

ADJACENT = (torch.eye(20).roll(1, 0) + torch.eye(20) + torch.eye(20).roll(-1, 0)) / 3
EIGHT = (
    "1-D CNN ending with a convolution",
    "CNN with log-softmax",
    "GRU, a head at each position",
    "MLP with batch norm",
    "TabTransformer",
    "ResNet with group norm",
    "bag of words",
    "small ViT",
)


class UNet(nn.Module):
    """Two levels with a shortcut between them; the mean over the picture is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
        self.up, self.out = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10) for images (B, 3, H, W)."""
        first = self.down(x)
        out: Tensor = self.out(torch.cat([self.up(self.low(first)), first], 1)).mean((2, 3))
        return out


class Graph(nn.Module):
    """Two graph convolutions over rings of 20 nodes, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.register_buffer("near", ADJACENT.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10) for nodes (B, 20, 16)."""
        near = self.get_buffer("near")
        out: Tensor = self.out(torch.relu(near @ self.second(torch.relu(near @ self.first(x)))).mean(1))
        return out


class Vit(nn.Module):
    """Sixteen patches of an image, two layers of width 64."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.place = nn.Conv2d(3, 64, 4, 4), nn.Parameter(0.02 * torch.randn(1, 16, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10) for images (B, 3, 16, 16)."""
        out: Tensor = self.head(self.blocks(self.patches(x).flatten(2).mT + self.place).mean(1))
        return out


class Towers(nn.Module):
    """Two perceptrons, each of one half of the numbers, whose products are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in "ab")
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10) for numbers (B, 64)."""
        out: Tensor = self.out(self.one(x[:, :32]) * self.other(x[:, 32:]))
        return out


class Attending(nn.Module):
    """An LSTM over words whose states are weighted by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(500, 32), nn.LSTM(32, 48, batch_first=True)
        self.score, self.out = nn.Linear(48, 1), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10) for ids (B, L)."""
        states = self.lstm(self.embedding(x))[0]
        out: Tensor = self.out((self.score(states).softmax(1) * states).sum(1))
        return out


def tabular() -> nn.Module:
    """Return linear layers with batch norm and dropout."""
    pairs = [
        (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.1)) for a, b in ((30, 64), (64, 32))
    ]
    return Columns(nn.Sequential(*[layer for pair in pairs for layer in pair], nn.Linear(32, 10)))


def many(read: Callable[[], FederatedData]) -> FederatedData:
    """Return a stranger's data with 40 clients of 43 training examples each."""
    with mock.patch.multiple(modules, CLIENTS=40, EXAMPLES=48):
        return read()


def ecg() -> FederatedData:
    """Return clients with one channel of 180 samples an example."""
    return noise(40, 60, 1, 180)


ALL = CASES | {
    "text transformer": Case(
        lambda: Columns(attention(64, 2)), lambda: words(40, 60, 32, 1000), 10, 16, 0.05
    ),
    "small U-Net": Case(UNet, lambda: noise(20, 40, 3, 16, 16), 4, 10, 0.05),
    "graph convolutions, 20 nodes": Case(Graph, lambda: noise(60, 60, 20, 16), 20, 20, 0.05),
    "tiny ViT": Case(Vit, lambda: noise(30, 40, 3, 16, 16), 6, 10, 0.05),
    "ECG, 1-D CNN": Case(lambda: Columns(signals(1, 16, 32)), ecg, 10, 20, 0.05),
    "two towers": Case(Towers, lambda: noise(100, 60, 64), 20, 20, 0.05),
    "tabular MLP, BatchNorm, dropout": Case(tabular, lambda: noise(100, 60, 30), 20, 20, 0.05),
    "LSTM with attention": Case(Attending, lambda: words(40, 60, 40, 500), 8, 20, 0.05),
    "small ResNet on 8 x 8": Case(
        lambda: Columns(resnet((32, 32), lambda n: nn.GroupNorm(8, n), 1)),
        lambda: noise(40, 40, 3, 8, 8),
        10,
        10,
        0.05,
    ),
}
ALL |= {
    f"stranger: {name}": Case(
        STRANGERS[name].make,
        lambda n=name: many(STRANGERS[n].read),
        20,
        8,
        0.05,
        plain=STRANGERS[name].plain,  # type: ignore[misc]
    )
    for name in EIGHT
}


PEERED = (
    "logistic regression",
    "MLP, 0.2 M",
    "ResNet-18, GroupNorm",
    "transformer, 0.7 M",
    "embedding bag",
    "text transformer",
    "small U-Net",
    "tiny ViT",
    "ECG, 1-D CNN",
    "LSTM with attention",
)
"""Trained by pfl and Flower's simulation too: models without a private part and without running statistics."""


@dataclass(frozen=True)
class OwnWorkload(Workload):
    """A case as the other libraries' processes take it."""

    def data(self) -> list[dict[str, np.ndarray]]:
        """Return every client's columns: ``x`` and ``label``."""
        federation = ALL[self.name.removeprefix(OWN)].data()
        rows = [federation.rows(client, "train") for client in range(len(federation))]
        batches = [federation.batch(np.arange(r.start, r.stop)) for r in rows]
        return [{n: v.numpy() for n, v in batch.items()} for batch in batches]


def own_workload(name: str) -> OwnWorkload:
    """Return the workload ``own: NAME`` of a case."""
    case = ALL[name.removeprefix(OWN)]
    return OwnWorkload(
        name,
        len(case.data()),
        case.cohort,
        case.batch,
        1,
        "sgd",
        case.rate,
        0.0,
        None,
        case.module,
        lambda rng: {},
        case.cohort,
    )


def cohorts(clients: int, cohort: int, turns: int) -> list[list[int]]:
    """Return the clients of each turn."""
    rng = np.random.default_rng(0)
    return [sorted(rng.choice(clients, cohort, replace=False).tolist()) for _ in range(turns)]
