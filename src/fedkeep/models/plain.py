"""Networks that `model.kind = "auto"` takes for tables, series and images: small, normed, with body and head."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.core.declared import declare
from fedkeep.core.errors import DataError
from fedkeep.models.cnn import scaled
from fedkeep.models.linear import outputs
from fedkeep.nn import GRU

GROUPS = 4
REGIONS = 4


class MLP(nn.Module):
    """x → linear, layer norm, ReLU → head.

    The names of its parts, for patterns: ``encoder.*``, its norm ``encoder.norm.*``, and ``head.*``.

    Args:
        features: entries of ``x``.
        classes: number of labels; 1 for regression, and outputs are then predictions (B,) in place of logits.
        hidden: units of the hidden layer.
    """

    def __init__(self, features: int, classes: int, *, hidden: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential()
        self.encoder.add_module("linear", nn.Linear(features, hidden))
        self.encoder.add_module("norm", nn.LayerNorm(hidden))
        self.encoder.add_module("relu", nn.ReLU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (B, classes), or predictions (B,) for regression, for x of shape (B, features)."""
        return outputs(self.head(self.encoder(x)))


class SequenceClassifier(nn.Module):
    """Series of numbers x → bidirectional GRU → last forward ‖ last backward state → head.

    The names of its parts, for patterns: ``encoder.*`` and ``head.*``. Series have any number of steps.

    Args:
        step_features: numbers in a step.
        classes: number of labels; 1 for regression, and outputs are then predictions (B,) in place of logits.
        hidden: GRU units per direction; features have 2·hidden entries.
    """

    def __init__(self, step_features: int, classes: int, *, hidden: int = 64) -> None:
        super().__init__()
        self.encoder = GRU(step_features, hidden, bidirectional=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor, x_length: Tensor | None = None) -> Tensor:
        """Return logits, shape (B, classes), or predictions (B,) for regression.

        Args:
            x: (B, L, step_features); what stands behind a series' end is not read.
            x_length: (B,) int64 from 1 to L; None: all L.

        Raises:
            DataError: a shape or a length is wrong.
        """
        return outputs(self.head(self.encoder.pooled(x.to(next(self.encoder.parameters()).dtype), x_length)))


class ResidualBlock(nn.Module):
    """Twice 3 × 3 convolution and group norm, beside a shortcut; halves height and width.

    Source: K. He et al., "Deep Residual Learning for Image Recognition", 2016, with the norm of Y. Wu and K. He, "Group
    Normalization", 2018, which depends on no other example.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, width)
        self.shortcut = nn.Conv2d(channels, width, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, ⌈H / 2⌉, ⌈W / 2⌉) for (B, channels, H, W)."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """Convolution and group norm → residual blocks, each of half the side → means of 4 × 4 regions → head.

    One mean over all pixels, as in the source, forgets where things are: few images teach more with regions.

    The names of its parts, for patterns: ``encoder.*`` and ``head.*``. Images have any side.

    Args:
        classes: number of labels; 1 for regression, and outputs are then predictions (B,) in place of logits.
        channels: of an image.
        widths: channels behind the first convolution and behind each block, multiples of 4.
    """

    def __init__(self, classes: int, channels: int = 3, *, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.channels = channels
        first, *others = widths
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, first, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, first),
            nn.ReLU(),
            *(ResidualBlock(before, width) for before, width in zip(widths[:-1], others, strict=True)),
            nn.AdaptiveAvgPool2d(REGIONS),
            nn.Flatten(),
        )
        self.head = nn.Linear(REGIONS**2 * widths[-1], classes)
        declare(self, takes_bytes=True)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits, shape (B, classes), for images (B, channels, height, width), uint8, or float from 0 to 1."""
        if image.shape[1] != self.channels:
            raise DataError(
                "{model} takes images of {wanted} channels; got {got}. Make it with the channels of the data.",
                model=type(self).__name__,
                wanted=self.channels,
                got=tuple(image.shape[1:]),
            )
        kind = next(self.encoder.parameters()).dtype
        pixels = image.to(kind) / 127.5 - 1 if not image.is_floating_point() else scaled(image, kind)
        return outputs(self.head(self.encoder(pixels)))
