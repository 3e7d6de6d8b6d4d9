"""Augmented images: a term that sees each training image changed at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.terms import Around, Term


@dataclass(frozen=True)
class Augmented(Around):
    """A term of images moved by up to ``shift`` pixels each way and mirrored with probability one half, or transformed.

    Where gradients are off, as for validation losses, images stay as they are. Draws come from torch's generator, which
    a local run seeds.

    Attributes:
        term: the term.
        shift: pixels; what moves in at an edge is that edge, repeated.
        mirror: whether left and right are swapped at random.
        column: of the images, shape (B, channels, height, width).
        transform: a function that changes an image, (channels, height, width), in place of shift and mirror, e.g. one of a
            module's top that calls ``torchvision.transforms.v2``. Each image is given to it alone, in the dtype that the data have; what it gives
            has one shape and dtype for all. It draws from torch's generator.
    """

    term: Term
    shift: int = 4
    mirror: bool = True
    column: str = "image"
    transform: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_range("[0, inf]", MethodError, shift=self.shift)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        if self.column not in batch:
            raise MethodError(
                "Augmented images are wanted from the column {column!r}; the data have {there}. Name the "
                "column of the images, or leave augmentation out.",
                column=self.column,
                there=sorted(batch),
            )
        if torch.is_grad_enabled():
            batch = {**batch, self.column: self._changed(batch[self.column])}
        return self.term(net, params, batch, received)

    def _changed(self, images: Tensor) -> Tensor:
        if self.transform is None:
            return moved(images, self.shift, self.mirror)
        return torch.stack([self.transform(image) for image in images])


def moved(image: Tensor, shift: int, mirror: bool) -> Tensor:
    """Return images (B, C, H, W), each shifted by its own draw from −shift … shift per axis, and perhaps mirrored."""
    count, _, height, width = image.shape
    down, right = torch.randint(-shift, shift + 1, (2, count, 1), device=image.device)
    rows = (torch.arange(height, device=image.device) + down).clamp(0, height - 1)  # (B, H)
    columns = (torch.arange(width, device=image.device) + right).clamp(0, width - 1)  # (B, W)
    if mirror:
        columns = torch.where(torch.rand(count, 1, device=image.device) < 0.5, columns.flip(1), columns)
    each = torch.arange(count, device=image.device)[:, None, None]
    return image[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
