"""Parquet files of encoded images (JPEG, PNG), decoded by Pillow."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, did_you_mean
from fedkeep.data.images import Pixels, check_range
from fedkeep.data.readers.files import existing, sha256
from fedkeep.data.readers.load import damaged_parquet

COLUMNS = ("jpeg", "png", "image", "img")
FORMATS = ("JPEG", "PNG")
Part = tuple[Pixels, NDArray[np.int64]]
MOST_KEPT = 2  # a training and a test file


def read_pictures(
    folder: Path,
    part: str,
    label: Sequence[str],
    shape: tuple[int, int, int],
    classes: int,
    source: dict[str, str],
) -> Part:
    """Read all files ``*<part>*.parquet`` of a folder, in the order of their names.

    Args:
        folder: of the files.
        part: "train" or "test".
        label: possible names of the column of labels, integers.
        shape: channels (1 or 3), height and width that every image must have.
        classes: labels are below it.
        source: takes the files' sha256.

    Returns:
        Images uint8 (n, *shape) and labels int64 (n,). The column of images is called jpeg, png, image or img; its
        values are files' bytes, or structures with such a field ``bytes`` (as Hugging Face ``datasets`` writes).

    Raises:
        DataError: no such file, a damaged one, a missing column, a value that is no image of that shape, or a label
            out of range; file and row are named.
    """
    paths = sorted(folder.glob(f"*{part}*.parquet"))
    if not paths:
        raise DataError(
            "Wanted a file *{part}*.parquet in {folder}; there is none. Check the folder.",
            part=part,
            folder=folder,
        )
    read = []
    for path in paths:
        digest = sha256(existing(path))
        read.append(_decoded(path, digest, tuple(label), shape))
        check_range(read[-1][1], classes, path)
        source[path.name] = digest
    return np.concatenate([images for images, _ in read]), np.concatenate([labels for _, labels in read])


@lru_cache(MOST_KEPT)
def _decoded(path: Path, digest: str, label: tuple[str, ...], shape: tuple[int, int, int]) -> Part:
    """Return a file's images and labels; this process keeps the last few files', by their digest too, not to be written.

    Decoding 60,000 images takes seconds, and a table of results reads the same files for every cell.
    """
    images, labels = _file(path, label, shape)
    images.flags.writeable = labels.flags.writeable = False
    return images, labels


def _file(path: Path, label: Sequence[str], shape: tuple[int, int, int]) -> Part:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = list(file.schema_arrow.names)
        columns = [_column(path, names, COLUMNS), _column(path, names, label)]
        images = np.empty((file.metadata.num_rows, *shape), np.uint8)
        labels = np.empty(len(images), np.int64)
        row = 0
        for batch in file.iter_batches(1024, columns=columns):
            for value, number in zip(*(batch[name].to_pylist() for name in columns), strict=True):
                images[row] = _picture(f"{path}, row {row}", value, shape)
                labels[row] = _number(f"{path}, row {row}", columns[1], number)
                row += 1
    except DataError:
        raise
    except Exception as error:  # pyarrow raises whatever its parsers raise on damaged bytes
        raise damaged_parquet(path, error) from error
    if not row:
        raise DataError("The data file {file} holds no image, only a header. Fetch it again.", file=path)
    return images, labels


def _column(path: Path, names: Sequence[str], known: Sequence[str]) -> str:
    for name in known:
        if name in names:
            return name
    raise DataError(
        "{file} has no column {known}; it has {names}.{near}",
        file=path,
        known=" or ".join(repr(name) for name in known),
        names=sorted(names),
        near=did_you_mean(known[0], names),
    )


def _number(where: str, column: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(
            "{where}: wanted an integer in column {column!r}; got {got!r}.",
            where=where,
            column=column,
            got=value,
        )
    if not abs(value) < 1 << 63:
        raise DataError(
            "{where}: wanted a class in column {column!r}; got {got}.", where=where, column=column, got=value
        )
    return value


def _picture(where: str, value: Any, shape: tuple[int, int, int]) -> Pixels:
    """Decode one image to uint8 (channels, height, width)."""
    from PIL import Image, UnidentifiedImageError

    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise DataError(
            "{where}: wanted the bytes of an image; got {got}.", where=where, got=type(content).__name__
        )
    channels, height, width = shape
    try:
        quiet = warnings.catch_warnings(action="ignore")  # what is odd, but can be decoded, is an image
        with quiet, Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.size != (width, height):
                raise DataError(
                    "{where}: wanted an image of {width} × {height} pixels; got {got} × {size}.",
                    where=where,
                    width=width,
                    height=height,
                    got=image.size[0],
                    size=image.size[1],
                )
            pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    except DataError:
        raise
    except Exception as error:  # Pillow raises whatever its decoders raise on damaged bytes
        reason = "not JPEG or PNG" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(
            "{where}: the image cannot be decoded ({reason}). Fetch the file again.",
            where=where,
            reason=reason,
        ) from error
    return pixels.reshape(height, width, channels).transpose(2, 0, 1)
