"""A local expert that is no convolutional network: what a device with little memory could train."""

from __future__ import annotations

from torch import Tensor, nn

from fedkeep import declare


class OnPixels(nn.Module):
    """A linear classifier on pixels, scaled from 0…255 to −1…1 as the convolutional networks' are.

    Args:
        classes: number of labels.
        channels: of an image.
        side: height and width of an image.
    """

    def __init__(self, classes: int, channels: int, side: int) -> None:
        super().__init__()
        self.out = nn.Linear(channels * side * side, classes)
        declare(self, takes_bytes=True)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits, shape (B, classes), for images (B, channels, side, side), uint8."""
        logits: Tensor = self.out((image.to(self.out.weight.dtype) / 127.5 - 1).flatten(1))
        return logits
