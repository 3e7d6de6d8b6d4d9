"""A set of images in one ``.npz`` file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.data.arrays import read_npz
from fedkeep.data.images import ImageSet, check_range
from fedkeep.data.readers.files import existing, sha256


def npz_images(
    path: str | Path,
    images: str = "images",
    label: str = "label",
    names: str | None = None,
    train: int | None = None,
) -> ImageSet:
    """Read images and labels from arrays of an ``.npz`` file.

    Args:
        path: the file.
        images: the array of images: uint8, (n, height, width, channels) with 1 or 3 channels, or (n, height, width).
        label: the array of labels, whole numbers (n,).
        names: the array of the classes' names; None: ``class 0`` up to the largest label.
        train: how many of the images, the first ones, are official training images, the others test images; None: all.

    Raises:
        DataError: the file is missing or damaged, lacks an array, or one has another shape or type; or a label has no
            name.
    """
    file = existing(Path(path))
    pixels, labels, *named = read_npz(file, [images, label, *([] if names is None else [names])])
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] not in (1, 3):
        raise DataError(
            "{file}: wanted {wanted!r} as uint8 (n, height, width, 1 or 3 channels); got {got}, shape "
            "{shape}.",
            file=file,
            wanted=images,
            got=pixels.dtype,
            shape=pixels.shape,
        )
    if labels.dtype.kind not in "iu" or labels.shape != (len(pixels),) or not len(pixels):
        raise DataError(
            "{file}: wanted {wanted!r} with a whole number for each of {images} images, at least "
            "one; got {got}, shape {shape}.",
            file=file,
            wanted=label,
            images=len(pixels),
            got=labels.dtype,
            shape=labels.shape,
        )
    numbers = labels.astype(np.int64)
    known = named[0].tolist() if named else [f"class {n}" for n in range(int(numbers.max()) + 1)]
    if not isinstance(known, list) or not all(isinstance(name, str) for name in known):
        raise DataError(
            "{file}: wanted {wanted!r} with a text for each class; got {got}.",
            file=file,
            wanted=names,
            got=named[0].dtype,
        )
    check_range(numbers, len(known), file)
    planes = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return ImageSet(
        planes,
        numbers,
        len(planes) if train is None else train,
        tuple(known),
        file.stem,
        {file.name: sha256(file)},
    )
