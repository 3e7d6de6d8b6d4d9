"""A data set on disk: one npy file per array and ``data.json``. Nothing is pickled, everything can be mapped.

``data.json`` holds a checksum of each file, and one of itself. All are looked at when the data are read, also where
they are mapped: so each file is read once from its beginning to its end.
"""

from __future__ import annotations

import json
import operator
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, raising
from fedkeep.core.files import sync_folder
from fedkeep.core.sealed import check_format, is_sealed, seal
from fedkeep.data.arrays import read_npy
from fedkeep.data.columns import Column, Ragged
from fedkeep.data.ids import Ids, PackedIds, RangeIds

FORMAT = 2
_BLOCK = 1 << 20
Parts = tuple[dict[str, Column], NDArray[np.int64], Ids, NDArray[np.int64] | None, dict[str, Any]]


def check_new(folder: Path) -> None:
    """Raise DataError where a folder holds something, or is a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(
            "{file} exists already and isn't an empty folder. Choose another, or remove it.", file=folder
        )


def parent_of(folder: Path) -> Path:
    """Return the folder that a folder is made in, which there is then."""
    with raising(DataError, "Cannot write {folder}: {why}. Choose another.", OSError, folder=folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.parent


def save(
    folder: Path,
    columns: Mapping[str, Column],
    offsets: NDArray[np.int64],
    ids: Ids,
    bounds: NDArray[np.int64] | None,
    meta: Mapping[str, Any],
) -> None:
    """Write a data set into a new folder; it appears whole or not at all."""
    check_new(folder)
    arrays: dict[str, NDArray[Any]] = {"offsets": offsets}
    if bounds is not None:
        arrays["bounds"] = bounds
    kinds = {}
    for name, column in columns.items():
        kinds[name] = "ragged" if isinstance(column, Ragged) else "dense"
        arrays |= _arrays(f"column.{name}", column)
    about: dict[str, Any] = {
        "format": FORMAT,
        "columns": kinds,
        "split": bounds is not None,
        "meta": dict(meta),
    }
    if isinstance(ids, RangeIds):
        about["ids"] = {"pattern": ids.pattern, "n": ids.n}
    else:
        about["ids"] = "packed"
        arrays |= _arrays("ids", ids.text) | {"ids.order": ids.order}

    with raising(
        DataError,
        "Cannot save the data: {why}. Keep numbers, text, lists and dicts in meta.",
        TypeError,
        ValueError,
    ):
        about = json.loads(json.dumps(about, default=_plain))
    # A name that nobody can foresee, in the same folder: mkdir refuses what is there already.
    staged = folder.parent / f"{folder.name[:40]}.{secrets.token_hex(8)}.partial"
    made = False
    try:
        if folder.resolve() == Path.cwd():
            raise DataError(
                "{file} is the folder that the program runs in, and would be replaced as a whole. Name "
                "another.",
                file=folder,
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged.mkdir()
        made = True
        for name, array in arrays.items():
            with _flushed(staged / f"{name}.npy") as file:
                np.save(file, array, allow_pickle=False)
        sealed = seal({**about, "crc32": checksums(staged)})
        with _flushed(staged / "data.json") as file:
            file.write(json.dumps(sealed, indent=1).encode())
        sync_folder(staged)
        if folder.exists():
            folder.rmdir()  # it is empty; else this is an error, and nothing is lost
        staged.replace(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise DataError(
            "Cannot write {folder}: {error}. Nothing was kept; free space or choose another.",
            folder=folder,
            error=error,
        ) from error
    finally:
        if made:
            shutil.rmtree(staged, ignore_errors=True)  # gone already where all went well


@contextmanager
def _flushed(path: Path) -> Iterator[IO[bytes]]:
    """Give a new file to write, and flush it to the disk."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def damaged(folder: str | Path, error: DataError) -> DataError:
    """Return what to say of a folder of saved data that hold what no data may."""
    return DataError("{file} is damaged: {error}", file=folder, error=error)


def load(folder: Path, mmap: bool) -> Parts:
    """Read what :func:`save` wrote."""
    path = folder / "data.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(about, dict) or not isinstance(about.get("meta", {}), dict):
            raise TypeError("wanted an object, with an object 'meta'")
        check_format(path, about.get("format"), FORMAT, DataError, anew="save the data again")
        if not is_sealed(about):
            raise DataError(
                "{file} is damaged or was edited: its checksum is not that of its content. Save the data "
                "again.",
                file=path,
            )
        columns: dict[str, Column] = {}
        for name, kind in about["columns"].items():
            if not name.isidentifier():  # before it names a file
                raise ValueError(f"a column is called {name!r}")
            columns[name] = (
                _ragged(folder, f"column.{name}", mmap)
                if kind == "ragged"
                else _array(folder, f"column.{name}", mmap)
            )
        ids: Ids
        if about["ids"] == "packed":
            ids = PackedIds(_ragged(folder, "ids", mmap), _array(folder, "ids.order", mmap))
            ids.check()
        else:
            ids = RangeIds(operator.index(about["ids"]["n"]), about["ids"]["pattern"])
        bounds = _array(folder, "bounds", mmap) if about["split"] else None
        offsets = _array(folder, "offsets", mmap)
        for name, found in checksums(folder).items():
            if found != about["crc32"].get(name, found):
                raise DataError(
                    "{folder} is damaged: its checksum is not the saved one. Save the data again.",
                    folder=folder / name,
                )
        return columns, offsets, ids, bounds, about["meta"]
    except FileNotFoundError as error:
        raise DataError(
            "{file} is not a saved data set: {name} is missing. Give a folder that FederatedData.save wrote.",
            file=folder,
            name=path.name,
        ) from error
    except DataError as error:
        if str(folder) in str(error):
            raise
        raise damaged(folder, error) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "{file} is damaged ({error_type}: {error}). Save the data again.",
            file=path,
            error_type=type(error).__name__,
            error=error,
        ) from error


def checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each array's file, by the file's name."""
    return {path.name: _crc32(path) for path in sorted(folder.glob("*.npy"))}


def _crc32(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


def _arrays(name: str, column: Column) -> dict[str, NDArray[Any]]:
    if isinstance(column, Ragged):
        return {f"{name}.values": column.values, f"{name}.offsets": column.offsets}
    return {name: column}


def _ragged(folder: Path, name: str, mmap: bool) -> Ragged:
    return Ragged(_array(folder, f"{name}.values", mmap), _array(folder, f"{name}.offsets", mmap))


def _array(folder: Path, name: str, mmap: bool) -> NDArray[Any]:
    with raising(
        DataError,
        "{file} is incomplete: {name}.npy is missing. Save the data again.",
        FileNotFoundError,
        file=folder,
        name=name,
    ):
        return read_npy(folder / f"{name}.npy", mmap)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"meta holds a {type(value).__name__}, which JSON cannot hold")
