"""Images in files of arrays: Fashion-MNIST in its four original gzipped IDX files, and any set in one ``.npz`` file.

H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms",
arXiv:1708.07747, 2017. An IDX file is a header of big-endian uint32 (a magic number, then one size an axis) and bytes.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, raising
from fedkeep.core.files import expanded
from fedkeep.data.arrays import SHRINKS, names_in, read_npz
from fedkeep.data.images import ImageSet, Pixels, check_range, joined
from fedkeep.data.readers.opened_files import existing, readable, sha256

FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
SIDE = 28
LAYOUTS = (
    [("x_train", "y_train"), ("x_test", "y_test")],
    [(f"{part}_images", f"{part}_labels") for part in ("train", "val", "test")],
)
"""Names of arrays of images and labels in files of others, Keras' and MedMNIST's; the last are test images."""
MAGIC = {2051: "images", 2049: "labels"}


def fashion_mnist(folder: str | Path) -> ImageSet:
    """Read Fashion-MNIST: 28 × 28 grey images of 10 classes, shape (1, 28, 28).

    Args:
        folder: holds ``train-images-idx3-ubyte.gz``, ``train-labels-idx1-ubyte.gz``,
            ``t10k-images-idx3-ubyte.gz`` and ``t10k-labels-idx1-ubyte.gz``.

    Raises:
        DataError: a file is missing, empty, truncated or not what its name says, images have another size, images
            and labels differ in number, or a label is out of range; the message names the file.
    """
    source: dict[str, str] = {}
    train, test = (_part(expanded(folder), part, source) for part in ("train", "t10k"))
    return joined(train, test, FASHION, "fashion_mnist", source)


def _part(folder: Path, part: str, source: dict[str, str]) -> tuple[Pixels, NDArray[np.int64]]:
    images = existing(folder / f"{part}-images-idx3-ubyte.gz")
    labels = existing(folder / f"{part}-labels-idx1-ubyte.gz")
    pixels = read_idx(images, (SIDE, SIDE))
    numbers = read_idx(labels, ()).astype(np.int64)
    if len(pixels) != len(numbers):
        raise DataError(
            "{labels} holds {labels_count:,} labels, but {name} {images:,} images. Fetch both again.",
            labels=labels,
            labels_count=len(numbers),
            name=images.name,
            images=len(pixels),
        )
    check_range(numbers, len(FASHION), labels)
    source |= {file.name: sha256(file) for file in (images, labels)}
    return pixels[:, None], numbers


def read_idx(path: Path, size: tuple[int, ...]) -> Pixels:
    """Return the bytes of a gzipped IDX file, uint8 (entries, *size): images of a size, or labels for ``()``.

    Raises:
        DataError: another kind of file, another size, or more or fewer bytes than the header promises.
    """
    axes = 1 + len(size)
    magic = 2048 + axes  # 0x08 for unsigned bytes, then the number of axes
    with (
        readable(path),
        raising(
            DataError,
            "{file} is truncated or no gzip file ({why}). Fetch it again.",
            EOFError,
            gzip.BadGzipFile,
            zlib.error,
            file=path,
        ),
        gzip.open(path, "rb") as file,
    ):
        head = file.read(4 * (1 + axes))
        numbers = np.frombuffer(head[: len(head) // 4 * 4], ">u4").tolist()
        entries = numbers[1] if len(numbers) > axes and [numbers[0], *numbers[2:]] == [magic, *size] else 0
        if not entries:
            raise DataError(
                "{file}: wanted {wanted}, at least one, a header of {header}; got {got}. Fetch it again.",
                file=path,
                wanted=MAGIC[magic],
                header=" ".join(map(str, [magic, "n", *size])),
                got=" ".join(map(str, numbers)) or "fewer than 4 bytes",
            )
        wanted = entries * math.prod(size)
        if wanted > (most := SHRINKS * path.stat().st_size):  # before taking memory
            raise DataError(
                "{file}: the header promises {wanted:,} bytes; a gzip file of this length holds at most {most:,}. "
                "Fetch it again.",
                file=path,
                wanted=wanted,
                most=most,
            )
        body = file.read(wanted + 1)
    if len(body) != wanted:
        more = "more follow" if len(body) > wanted else f"only {len(body):,} follow"
        raise DataError(
            "{file}: the header promises {entries:,} {MAGIC}, {wanted:,} bytes; {more}. Fetch it again.",
            file=path,
            entries=entries,
            MAGIC=MAGIC[magic],
            wanted=wanted,
            more=more,
        )
    return np.frombuffer(body, np.uint8).reshape(entries, *size)


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
        images: the array of images: uint8, (n, height, width, channels) with 1 or 3 channels, or (n, height, width). Where
            there is no ``images``, those of Keras are found (``x_train`` and ``x_test``) and of MedMNIST (``train_images``,
            ``val_images`` and ``test_images``), of which the validation images are training images.
        label: the array of labels, whole numbers (n,) or (n, 1); it is found as ``images`` is.
        names: the array of the classes' names; None: ``class 0`` up to the largest label.
        train: how many of the images, the first ones, are official training images, the others test images; None: all, or
            those that the arrays' names say.

    Raises:
        DataError: the file is missing or damaged, lacks an array, or one has another shape or type; or a label has no
            name.
    """
    file = existing(expanded(path), key="data.path")
    pairs, tests = [(images, label)], None
    if (images, label) == ("images", "label"):
        there = names_in(file)
        pairs = next((those for those in LAYOUTS if {*those[0]} <= there), pairs)
        pairs, tests = [pair for pair in pairs if {*pair} & there] or pairs, pairs[1:][-1:]
    parts = [_pair(file, *pair) for pair in pairs]
    shapes = {part[0].shape[1:] for part in parts}
    if len(shapes) > 1:
        raise DataError(
            "{file}: wanted images of one shape in {arrays}; got {got}.",
            file=file,
            arrays=[pair[0] for pair in pairs],
            got=sorted(shapes),
        )
    numbers = np.concatenate([own for _, own in parts])
    named = None if names is None else read_npz(file, [names])[0]
    known = [f"class {n}" for n in range(int(numbers.max()) + 1)] if named is None else named.tolist()
    if not isinstance(known, list) or not all(isinstance(name, str) for name in known):
        raise DataError(
            "{file}: wanted {wanted!r} with a text for each class; got {got}.",
            file=file,
            wanted=names,
            got=named.dtype if named is not None else None,
        )
    check_range(numbers, len(known), file)
    trained = sum(len(own) for pair, (_, own) in zip(pairs, parts, strict=True) if [pair] != tests)
    return ImageSet(
        np.concatenate([planes for planes, _ in parts]),
        numbers,
        trained if train is None else train,
        tuple(known),
        file.stem,
        {file.name: sha256(file)},
    )


def _pair(file: Path, images: str, label: str) -> tuple[Pixels, NDArray[np.int64]]:
    """Return two arrays of a file as images, channels first, and labels."""
    pixels, labels = read_npz(file, [images, label])
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
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
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
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels.astype(np.int64)
