"""Small generated image sets in the layouts that the mixture of experts' scenes read."""

from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray


def drawn(labels: NDArray[np.int64], channels: int, side: int, seed: int) -> NDArray[np.uint8]:
    """Return noise with a bright square whose place is the class's."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 90, (len(labels), channels, side, side), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        y, x = divmod(int(label) % 16, 4)
        image[int(label) // 16 % channels :, 7 * y : 7 * y + 6, 7 * x : 7 * x + 6] = 230
    return images


def write_fashion(folder: Path, train: int = 300, test: int = 300) -> None:
    """Write Fashion-MNIST's four files."""
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % 10
        images = drawn(labels, 1, 28, count)
        for name, head, body in (
            ("images-idx3", struct.pack(">4I", 2051, count, 28, 28), images.tobytes()),
            ("labels-idx1", struct.pack(">2I", 2049, count), labels.astype(np.uint8).tobytes()),
        ):
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(head + body, mtime=0))


def write_cifar(folder: Path, classes: int = 10, train: int = 300, test: int = 300) -> None:
    """Write CIFAR-10 or CIFAR-100 as Parquet files of PNG images."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra images")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra images")
    image_room = pytest.importorskip("PIL.Image", reason="needs the extra images")
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("test", test)):
        labels = np.arange(count) % classes
        encoded = []
        for image in drawn(labels, 3, 32, count):
            file = io.BytesIO()
            image_room.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(
                file, "PNG", compress_level=1
            )
            encoded.append(file.getvalue())
        columns = {"png": encoded, "label" if classes == 10 else "fine_label": labels.tolist()}
        parquet.write_table(pyarrow.table(columns), folder / f"cifar_{part}.parquet")
