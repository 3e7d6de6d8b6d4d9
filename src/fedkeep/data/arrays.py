"""Arrays from ``.npy`` and ``.npz`` files that nobody vouches for.

What a header promises is compared with the bytes that are there before any memory is taken. numpy's readers raise
whatever their parsers raise on damaged bytes (``tokenize.TokenError``, ``zlib.error``, ``RecursionError``, …), so all
of it becomes a DataError here.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, reading

SHRINKS = 1040  # bytes that one byte of a deflated stream may stand for, at most (zlib's own bound is 1032)
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def read_npy(path: Path, mmap: bool = False) -> NDArray[Any]:
    """Return the array of an ``.npy`` file; with ``mmap`` its values stay on disk until they are touched.

    Raises:
        FileNotFoundError: there is none.
        DataError: the file is damaged, is longer or shorter than its header says, or holds Python objects.
    """
    with reading("{file} is damaged: {why}. Save the data again.", FileNotFoundError, file=path):
        with path.open("rb") as file:
            _header(file, path.stat().st_size)
        # asarray turns a memmap into a plain view of it: slicing a memmap object costs ten times as much.
        return np.asarray(np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False))


def read_npz(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Return arrays of an ``.npz`` file by name.

    Raises:
        DataError: the file is damaged, lacks one of them, is compressed otherwise than ``numpy.savez_compressed`` does,
            or holds Python objects.
    """
    with (
        reading("{file} is damaged or no .npz file of plain arrays ({why}). Fetch it again.", file=path),
        zipfile.ZipFile(path) as archive,
    ):
        held = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if missing := [name for name in names if name not in held]:
            raise DataError(
                "{file}: wanted the arrays {wanted}; {missing!r} is not among {there}.",
                file=path,
                wanted=" and ".join(map(repr, names)),
                missing=missing[0],
                there=sorted(held)[:10],
            )
        return [_member(archive, held[name]) for name in names]


def names_in(path: Path) -> frozenset[str]:
    """Return the names of the arrays in an ``.npz`` file; of one that cannot be read none, whoever reads it says why."""
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(name.removesuffix(".npy") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return frozenset()


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    if info.compress_type not in METHODS:
        raise ValueError(f"{info.filename} is compressed by method {info.compress_type}")
    if info.file_size > SHRINKS * (info.compress_size + 1):
        raise ValueError(
            f"{info.filename} promises {info.file_size:,} bytes of {info.compress_size:,} compressed ones"
        )
    with archive.open(info) as file:
        _header(file, info.file_size)
    with archive.open(info) as file:
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
        if file.read(1):  # reads to the end, where the checksum is compared
            raise ValueError(f"{info.filename} is longer than its header says")
        return array


def _header(file: IO[bytes], length: int) -> None:
    """Raise ValueError unless a file's header promises as many bytes as there are."""
    version = npy.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"version {version} of the format is for tables with named fields")
    place, size = file.tell(), 2 if version == (1, 0) else 4
    promised = int.from_bytes(file.read(size), "little")
    if promised > length:  # numpy would ask for so much memory first
        raise ValueError(f"its header promises to be {promised:,} bytes long; the file has {length:,}")
    file.seek(place)
    shape, _, dtype = HEADERS[version](file)
    if dtype.hasobject or dtype.fields is not None:
        raise ValueError(f"it holds {'Python objects' if dtype.hasobject else 'a table with named fields'}")
    if any(size < 0 for size in shape):
        raise ValueError(f"its header promises the shape {shape}")
    wanted, there = math.prod(shape) * dtype.itemsize, length - file.tell()
    if wanted != there:
        raise ValueError(f"its header promises {wanted:,} bytes of values; {there:,} follow")
