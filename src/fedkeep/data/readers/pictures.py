"""Encoded images (JPEG, PNG and others), in files of their own or in Parquet files, decoded by Pillow."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, did_you_mean
from fedkeep.data.images import Pixels, check_range
from fedkeep.data.readers.cells import INTEGER
from fedkeep.data.readers.load_table import load_table
from fedkeep.data.readers.opened_files import existing, sha256

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS = ("jpeg", "png", "image", "img")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
GREY = ("1", "L", "LA")
DEEP = ("I", "I;16", "I;16B", "I;16L", "F")
"""Modes of Pillow: of images without colours, and of more than 8 bits a pixel."""
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
        Images uint8 (n, *shape) and labels int64 (n,). The column of images is called jpeg, png, image or img; for its
        values see `encoded_in`.

    Raises:
        DataError: no such file, a damaged one, a missing column, a value that is no image of that shape, or a label
            out of range; the file is named, and the row where it is one value's.
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
    table = load_table(path, None)
    names = list(table.columns)
    image, number = _column(path, names, COLUMNS), _column(path, names, label)
    images = decoded(encoded_in(table.columns[image].tolist(), table.where), None)
    if images.shape[2:] != shape[1:]:
        raise DataError(
            "{file}: wanted images of {wanted} pixels; got {got}.",
            file=path,
            wanted=" × ".join(map(str, shape[1:])),
            got=" × ".join(map(str, images.shape[2:])),
        )
    images = np.repeat(images, shape[0] // images.shape[1], axis=1)  # all of them may be grey
    return images, np.asarray(table.each(number, INTEGER), np.int64)


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


def encoded_in(values: Sequence[Any], where: Callable[[int], object]) -> list[tuple[object, Path | bytes]]:
    """Return the files or bytes of images in the cells of a column, and their places.

    A cell holds bytes, or a structure with these as ``bytes`` or a file as ``path``, as Hugging Face ``datasets`` writes.

    Raises:
        DataError: a cell holds neither; or the file is missing.
    """
    found: list[tuple[object, Path | bytes]] = []
    for row, value in enumerate(values):
        content = value.get("bytes") if isinstance(value, dict) else value
        if content is None and isinstance(value, dict) and isinstance(value.get("path"), str):
            content = existing(Path(value["path"]))
        if not isinstance(content, bytes | Path):
            raise DataError(
                "{where}: wanted an image; got {got}.", where=where(row), got=type(content).__name__
            )
        found.append((where(row), content))
    return found


@contextmanager
def opened_picture(where: object, file: Path | io.BytesIO) -> Iterator[Image]:
    """Give an image of Pillow, of one of ``FORMATS``; DataError where it cannot be decoded, inside the block too."""
    from PIL import Image, UnidentifiedImageError

    try:
        quiet = warnings.catch_warnings(action="ignore")  # what is odd, but can be decoded, is an image
        with quiet, Image.open(file, formats=FORMATS) as image:
            yield image
    except DataError:
        raise
    except Exception as error:  # Pillow raises whatever its decoders raise on damaged bytes
        reason = f"none of {', '.join(FORMATS)}" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(
            "{where}: the image cannot be decoded ({reason}). Fetch the file again.",
            where=where,
            reason=reason,
        ) from error


def read_files(paths: Sequence[Path], size: int | Sequence[int] | None) -> Pixels:
    """Read one image a file; a file that stands there twice is decoded once. Arguments and errors as of :func:`decoded`.

    Raises:
        DataError: a file is missing, too.
    """
    once = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    images = decoded([(path, existing(path)) for path in once], size)
    return images if len(once) == len(paths) else images[[once[path] for path in paths]]


def decoded(encoded: Sequence[tuple[object, Path | bytes]], size: int | Sequence[int] | None) -> Pixels:
    """Return encoded images: uint8 (images, channels, height, width), 1 channel where all are grey, else 3.

    Args:
        encoded: at least one: its name in messages, and its file or bytes.
        size: height and width to bring every image to, or one number for both; None: all have one size.

    Raises:
        DataError: one cannot be decoded or has more than 8 bits a pixel, or images differ in size.
    """
    first, grey = (0, 0), True
    for place, content in encoded:
        with opened_picture(place, _file_of(content)) as image:
            if image.mode in DEEP:  # Pillow would cut off what is brighter than 255
                raise DataError(
                    "{file} has more than 8 bits a pixel (mode {mode}). Save it with 8, or put all images into an .npz "
                    "file.",
                    file=place,
                    mode=image.mode,
                )
            first = first if any(first) else image.size
            grey = grey and image.mode in GREY
            if size is None and image.size != first:
                raise DataError(
                    "{file} has {got} × {height} pixels, and {other} {width} × {rows}. Bring all to one size: "
                    "size = {size}, or size = [HEIGHT, WIDTH].",
                    file=place,
                    got=image.size[0],
                    height=image.size[1],
                    other=encoded[0][0],
                    width=first[0],
                    rows=first[1],
                    size=min(first),
                )
    height, width = (first[1], first[0]) if size is None else sides_of(size)
    images = np.empty((len(encoded), 1 if grey else 3, height, width), np.uint8)
    for number, (place, content) in enumerate(encoded):
        with opened_picture(place, _file_of(content)) as image:
            images[number] = _planes(image, images.shape[1], (width, height))
    return images


def _file_of(content: Path | bytes) -> Path | io.BytesIO:
    return io.BytesIO(content) if isinstance(content, bytes) else content


def sides_of(size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width; DataError where they are no whole numbers above 0."""
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise DataError("Wanted a size as a whole number above 0, or [height, width]; got {got!r}.", got=size)
    return sides


def _planes(image: Image, channels: int, size: tuple[int, int] | None = None) -> Pixels:
    """Return an image as uint8 (channels, height, width); ``size`` is (width, height)."""
    image = image.convert("RGB" if channels == 3 else "L")
    if size is not None and image.size != size:
        image = image.resize(size)
    return np.asarray(image).reshape(image.height, image.width, channels).transpose(2, 0, 1)
