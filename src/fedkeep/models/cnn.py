"""The small convolutional networks of the federated mixture of experts.

Source: arXiv:2010.02056, experiments ("two convolutional and two fully connected layers"); layer sizes from the
authors' code, state of November 2020. Both networks have three linear layers there, dropout behind the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.models.linear import outputs
from fedkeep.nn import ConvPool

KERNEL = 5


class CNN(nn.Module):
    """Twice (conv 5 × 5, ReLU, max-pool 2) → linear, ReLU, dropout → linear, ReLU → linear.

    Pixels are scaled by mean 0.5 and standard deviation 0.5: uint8 images from 0…255, float images from 0…1, both to
    −1…1.

    Args:
        classes: number of labels; 1 for regression, and outputs are then predictions (B,) in place of logits.
        channels: of an image.
        side: height and width of an image; 16 or more, and such that both poolings halve an even side.
        widths: channels behind the two convolutions.
        hidden: units of the first two linear layers.
        dropout: probability of dropping an entry behind the first linear layer.

    Raises:
        ConfigError: a side that the layers don't fit.
    """

    def __init__(
        self,
        classes: int,
        channels: int = 3,
        side: int = 32,
        *,
        widths: tuple[int, int] = (6, 16),
        hidden: tuple[int, int] = (120, 84),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        last = (side - 3 * (KERNEL - 1)) // 4  # ((side − 4) / 2 − 4) / 2
        if side % 4 or last < 1:
            raise ConfigError("side must be a multiple of 4, at least 16; got {got}.", got=side)
        self.shape = (channels, side, side)
        self.conv1 = ConvPool(channels, widths[0], KERNEL)
        self.conv2 = ConvPool(widths[0], widths[1], KERNEL, flat=True)
        self.fc1 = nn.Linear(widths[1] * last * last, hidden[0])
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(*hidden)
        self.out = nn.Linear(hidden[1], classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits, shape (B, classes), for images (B, channels, side, side), uint8 or float."""
        return self.head(self.features(image))

    def features(self, image: Tensor) -> Tensor:
        """Return the input of the last layer, shape (B, hidden[1])."""
        if tuple(image.shape[1:]) != self.shape:
            raise DataError(
                "{model} takes images of shape {wanted}; got {got}. Make it with the channels and the side of the data.",
                model=type(self).__name__,
                wanted=self.shape,
                got=tuple(image.shape[1:]),
            )
        x = self.conv1(scaled(image, self.conv1.weight.dtype))  # (B, W1, (side − 4) / 2, ·)
        x = self.conv2(x)  # (B, W2 · last · last)
        x = self.drop(F.relu(self.fc1(x)))
        return F.relu(self.fc2(x))

    def head(self, features: Tensor) -> Tensor:
        """Return logits for features, shape (B, classes)."""
        return outputs(self.out(features))


class FashionCNN(CNN):
    """The paper's network for Fashion-MNIST: a :class:`CNN` for 28 × 28 grey images with 6 and 12 channels."""

    def __init__(self, classes: int, dropout: float = 0.5) -> None:
        super().__init__(classes, 1, 28, widths=(6, 12), hidden=(84, 42), dropout=dropout)


class CifarCNN(CNN):
    """The paper's network for CIFAR-10 and CIFAR-100: a :class:`CNN` for 32 × 32 colour images, 6 and 16 channels."""

    def __init__(self, classes: int, dropout: float = 0.5) -> None:
        super().__init__(classes, dropout=dropout)


def scaled(image: Tensor, kind: torch.dtype) -> Tensor:
    """Return images from −1 to 1: from floats 0…1; bytes stay, as the layer scales them itself."""
    return image if image.dtype == torch.uint8 else image.to(kind) / 0.5 - 1
