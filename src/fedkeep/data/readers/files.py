"""Opening data files: every failure becomes a DataError that names the file, the line and the way out."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedkeep.core.errors import DataError


def existing(path: Path) -> Path:
    """Return the path of a file that exists and isn't empty."""
    if not path.is_file():
        where = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"Wanted the data file {path}, which {where}. Check the path.")
    if path.stat().st_size == 0:
        raise DataError(f"The data file {path} is empty. Fetch it again.")
    return path


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    r"""Yield (number from 1, line without its end) of a text file, gzipped if it ends in ``.gz``.

    Lines end at ``\n`` or ``\r\n`` alone: other separators of Unicode may stand inside a text.
    """
    existing(path)
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for raw in file:
                number += 1
                yield number, raw.decode(encoding).rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: not {encoding} text ({error.reason} at byte {error.start})."
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is truncated or no gzip file: it breaks off after line {number} ({error}). Fetch it again."
        ) from error
    if number == 0:
        raise DataError(f"The data file {path} holds no line. Fetch it again.")


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a file with one JSON object a line; blank lines are skipped."""
    found = False
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: not JSON ({error}). One object a line is wanted."
            ) from error
        if not isinstance(entry, dict):
            raise DataError(f"{path}, line {number}: wanted a JSON object; got {type(entry).__name__}.")
        found = True
        yield number, entry
    if not found:
        raise DataError(f"The data file {path} holds no line. Fetch it again.")
