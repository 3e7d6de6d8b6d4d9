"""The workloads' models in plain PyTorch, as a researcher would write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep import declare


class Document(nn.Module):
    """W1: char embedding 32 → BiLSTM 64 → ‖ user vector 32 → MLP 64 → 64 classes.

    Texts of unequal lengths are packed, PyTorch's own way; texts of one length need no packing.
    """

    def __init__(self, vocabulary: int = 100, classes: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True, bidirectional=True)
        self.user = nn.Parameter(torch.zeros(32))
        self.mlp = nn.Sequential(nn.Linear(160, 64), nn.ReLU(), nn.Linear(64, classes))
        declare(self, per_example=("user",))

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return logits (B, 64) for character ids (B, L) and lengths (B,)."""
        vector = self.encode(self.embedding(text), text_length)  # (B, 128)
        logits: Tensor = self.mlp(torch.cat([vector, self.user.expand(len(vector), -1)], 1))
        return logits

    def encode(self, x: Tensor, length: Tensor) -> Tensor:
        """Return the last states of both directions, (B, 128)."""
        if int(length.min()) == x.shape[1]:
            last = self.lstm(x)[1][0]
        else:
            packed = nn.utils.rnn.pack_padded_sequence(
                x, length.cpu(), batch_first=True, enforce_sorted=False
            )
            last = self.lstm(packed)[1][0]
        return torch.cat([last[0], last[1]], 1)


class PaddedDocument(Document):
    """The best that padding does for ragged texts: both directions as unpacked LSTMs, the second over a reversed copy.

    Unpacked LSTMs run on oneDNN. The state at a text's last character is read before padding, so results are exact.
    """

    def encode(self, x: Tensor, length: Tensor) -> Tensor:
        """Return the last states of both directions, (B, 128)."""
        steps = torch.arange(x.shape[1])
        turned = (length[:, None] - 1 - steps).remainder(x.shape[1])  # reversed inside each text's own length
        rows, last = torch.arange(len(x)), length - 1
        both = [self.direction(x, ""), self.direction(x[rows[:, None], turned], "_reverse")]
        return torch.cat([output[rows, last] for output in both], 1)

    def direction(self, x: Tensor, suffix: str) -> Tensor:
        """Return one direction's outputs, (B, L, 64)."""
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = [getattr(self.lstm, name + suffix) for name in names]
        start = x.new_zeros(1, len(x), 64)
        output: Tensor = torch.lstm(x, (start, start), weights, True, 1, 0.0, self.training, False, True)[0]
        return output


class Words(nn.Module):
    """W2: word embedding 200 → BiGRU 64 → masked mean → MLP 64 → 2 classes."""

    def __init__(self, vocabulary: int = 50_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 200)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.gru = nn.GRU(200, 64, batch_first=True, bidirectional=True)
        self.mlp = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return logits (B, 2) for word ids (B, L) and lengths (B,)."""
        output, _ = self.gru(self.embedding(text))  # (B, L, 128)
        inside = torch.arange(text.shape[1], device=text.device) < text_length[:, None]
        mean = (output * inside.unsqueeze(-1)).sum(1) / text_length[:, None]
        logits: Tensor = self.mlp(mean)
        return logits


class CNN(nn.Module):
    """W3: two convolutions 5 × 5 (32 and 64 channels, padding 2, ReLU, max-pool 2) → FC 512 → FC 10."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * 8 * 8, 512)
        self.out = nn.Linear(512, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (B, classes) for images (B, 3, 32, 32)."""
        x = F.max_pool2d(F.relu(self.conv1(image)), 2)  # (B, 32, 16, 16)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # (B, 64, 8, 8)
        logits: Tensor = self.out(F.relu(self.fc1(x.flatten(1))))
        return logits


class SmallCNN(nn.Module):
    """W4: two convolutions 5 × 5 (6 and 16 channels, ReLU, max-pool 2) → FC 120 → FC 84 → FC 10."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.out = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (B, classes) for images (B, 3, 32, 32), whose pixels 0…1 become −1…1."""
        x = F.max_pool2d(F.relu(self.conv1(image / 0.5 - 1)), 2)  # (B, 6, 14, 14)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # (B, 16, 5, 5)
        logits: Tensor = self.out(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))
        return logits
