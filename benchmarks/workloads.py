"""The workloads on which speed is measured. W1: FURL's document model, as a researcher would write it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.data import FederatedData


class PlainDocument(nn.Module):
    """W1's model in plain PyTorch: char embedding 32 → BiLSTM 64 → concat user vector 32 → MLP 64 → 64 classes."""

    per_example = ("user",)

    def __init__(self, vocabulary: int = 100, classes: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True, bidirectional=True)
        self.user = nn.Parameter(torch.zeros(32))
        self.mlp = nn.Sequential(nn.Linear(160, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for character ids x, (B, 64)."""
        _, (last, _) = self.lstm(self.embedding(x))
        text = torch.cat([last[0], last[1]], 1)
        return self.mlp(torch.cat([text, self.user.expand(len(text), -1)], 1))  # type: ignore[no-any-return]


def w1_data(users: int = 200, texts: int = 96, length: int = 64, seed: int = 0) -> FederatedData:
    """Return W1's data: ``users`` × ``texts`` random texts of ``length`` characters, 64 labels; all for training."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 100, (users * texts, length))
    label = rng.integers(0, 64, users * texts)
    client = np.repeat(np.arange(users), texts)
    return FederatedData.from_columns(client, {"x": x, "label": label}, split=["train"] * len(label))


def plain_round(
    model: nn.Module,
    private: dict[int, Tensor],
    data: FederatedData,
    clients: list[int],
    rate: float = 0.1,
    batch: int = 16,
) -> None:
    """One round as a researcher writes it: load weights, mini-batch loop, backward, step, weighted average."""
    start = {n: v.clone() for n, v in model.state_dict().items() if n != "user"}
    total = {n: torch.zeros_like(v) for n, v in start.items()}
    examples = 0
    for client in clients:
        user = private.get(client, torch.zeros(32))
        model.load_state_dict({**start, "user": user})
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        rows = data.rows(client, "train")
        x = torch.from_numpy(np.asarray(data.columns["x"][rows.start : rows.stop]))
        label = torch.from_numpy(np.asarray(data.columns["label"][rows.start : rows.stop]))
        for chosen in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), label[chosen]).backward()
            optimizer.step()
        trained = model.state_dict()
        private[client] = trained["user"].clone()
        for name in total:
            total[name] += len(x) * trained[name]
        examples += len(x)
    model.load_state_dict({**{n: v / examples for n, v in total.items()}, "user": torch.zeros(32)})
