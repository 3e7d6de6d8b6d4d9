"""Labelled images that belong to nobody yet: what the readers of image sets return and partitions divide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.columns import Rows, offsets_of
from fedkeep.data.federated import FederatedData
from fedkeep.data.ids import RangeIds
from fedkeep.data.splits import bounds_of

Pixels = NDArray[np.uint8]
BYTE = 255
Dealt = TypeVar("Dealt", covariant=True)


class Unowned(Protocol[Dealt]):
    """Labelled examples that belong to nobody yet, those to train on first, then those to test on."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The number of each example's class."""

    @property
    def train(self) -> int:
        """How many are to train on."""

    @property
    def label_names(self) -> Sequence[str]:
        """One per class."""

    @property
    def classes(self) -> int:
        """Number of classes."""

    @property
    def name(self) -> str:
        """Of the set."""

    def __len__(self) -> int: ...

    def dealt(
        self, parts: Sequence[tuple[Rows, ...]], about: Mapping[str, Any], sigma: Sequence[float] = ()
    ) -> Dealt:
        """Return the examples with these numbers as (train, valid, test) of clients; ``about`` says how they were dealt.

        ``sigma`` is of noise to add to each client's inputs, as of `noisy`; none where it is empty.
        """


@dataclass(frozen=True, eq=False)
class ImageSet:
    """An official training set followed by an official test set.

    Attributes:
        images: uint8 (images, channels, height, width).
        labels: int64 (images,), from 0 to ``len(label_names) - 1``.
        train: how many of the images are training images; the others are test images.
        label_names: one per class.
        name: of the set.
        source: sha256 by file.

    Raises:
        DataError: shapes or types are wrong, a label is out of range, or there is no image.
    """

    images: Pixels
    labels: NDArray[np.int64]
    train: int
    label_names: Sequence[str]
    name: str = "images"
    source: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise DataError(
                "Wanted images as uint8 (images, channels, height, width); got {got}, shape {shape}.",
                got=self.images.dtype,
                shape=self.images.shape,
            )
        if self.labels.dtype != np.int64 or self.labels.shape != (len(self.images),):
            raise DataError(
                "Wanted {wanted} labels as int64, one per image; got {got}, shape {shape}.",
                wanted=len(self.images),
                got=self.labels.dtype,
                shape=self.labels.shape,
            )
        if not 0 < self.train <= len(self.images):
            raise DataError(
                "Wanted 1 to {images} training images, the number of all; got {got}.",
                images=len(self.images),
                got=self.train,
            )
        check_range(self.labels, self.classes, self.name)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.label_names)

    def __len__(self) -> int:
        return len(self.images)

    def dealt(
        self, parts: Sequence[tuple[Rows, ...]], about: Mapping[str, Any], sigma: Sequence[float] = ()
    ) -> FederatedData:
        """Return the data of clients with these image numbers, (train, valid, test) each, with noise of ``sigma``."""
        counts = np.asarray([[len(rows) for rows in part] for part in parts], dtype=np.int64)
        rows = np.concatenate([np.sort(rows) for part in parts for rows in part])
        images = self.images[rows]
        if len(sigma):
            images = noisy(images, counts.sum(axis=1).tolist(), sigma, about["seed"], "image")
        return FederatedData(
            {"image": images, "label": self.labels[rows], "_image": rows},
            offsets_of(counts.sum(axis=1)),
            RangeIds(len(parts), "client-{}"),
            bounds_of(counts),
            {
                "name": self.name,
                "task": "multiclass",
                "classes": self.classes,
                "label_names": list(self.label_names),
                "partition": dict(about),
                "source": dict(self.source),
            },
            check=False,
        )

    def __repr__(self) -> str:
        shape = " × ".join(str(n) for n in self.images.shape[1:])
        return (
            f"ImageSet({self.name!r}, {self.train:,} train, {len(self) - self.train:,} test, {shape}, "
            f"{self.classes} classes)"
        )


def check_range(labels: NDArray[np.integer], classes: int, where: object) -> None:
    """Raise DataError at the first label that isn't one of the classes."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            "{file}: wanted labels 0 to {largest}; got {got} at image {row} and {more} more out of range. Fetch the file "
            "again.",
            file=where,
            largest=classes - 1,
            got=int(labels[wrong[0]]),
            row=int(wrong[0]),
            more=len(wrong) - 1,
        )


def joined(
    train: tuple[Pixels, NDArray[np.int64]],
    test: tuple[Pixels, NDArray[np.int64]] | None,
    label_names: Sequence[str],
    name: str,
    source: Mapping[str, str],
) -> ImageSet:
    """Return the set of these training and test images, each (images, labels)."""
    parts = [train] if test is None else [train, test]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ImageSet(images, labels, len(train[0]), tuple(label_names), name, dict(source))


def noisy(
    values: NDArray[Any], clients: Sequence[int], sigma: Sequence[float], seed: int, column: str
) -> NDArray[Any]:
    """Return numbers with normal noise, of the type that they have.

    Args:
        values: (rows, ...), client after client. Bytes are numbers from 0 to 1 in 255 steps, and stay in that range.
        clients: how many rows each has.
        sigma: each one's standard deviation: of bytes on the scale from 0 to 1; of others in units of the standard
            deviation of each number over all rows.
        seed, column: name the draws, together with the client's number.
    """
    made = values.copy()
    byte = values.dtype == np.uint8
    scale = np.float64(BYTE) if byte else np.nan_to_num(np.nanstd(values.astype(np.float64), axis=0))
    end = 0
    for number, (rows, level) in enumerate(zip(clients, sigma, strict=True)):
        end += rows
        own = made[end - rows : end]
        draw = numpy_generator(seed, f"partition/noise/{column}", f"client-{number}")
        changed = own + level * scale * draw.standard_normal(own.shape)
        own[...] = np.rint(changed).clip(0, BYTE) if byte else changed
    return made
