"""Opening data files: every failure becomes a DataError that names the file, the line and the way out."""

from __future__ import annotations

import datetime
import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkeep.core.errors import DataError, did_you_mean, first_line, shown

DATES = " Write dates as numbers: date.toordinal(), or seconds."
NAMING = {
    "user": " Name yours under [data], or as an argument: user = 'COLUMN'.",
    "label": " Name yours under [data], or as an argument: label = 'COLUMN'.",
    "text": " Name yours under [data], or as an argument: text = 'COLUMN', or of numbers features = ['COLUMN', ...].",
}
"""What to do where a column is missing that has its usual name."""
LONGEST_LINE = 1 << 26  # bytes; a gzipped file of a megabyte may hold a line of a gigabyte


def existing(path: Path) -> Path:
    """Return the path of a file that exists and isn't empty."""
    try:
        if not path.is_file():
            where = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
            raise DataError(f"Wanted the data file {path}, which {where}. Check the path.")
        if path.stat().st_size == 0:
            raise DataError(f"The data file {path} is empty. Fetch it again.")
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise unreadable(path, error) from error
    return path


def check_names(
    file: object, names: Collection[str], wanted: Sequence[str], naming: Mapping[str, str] = NAMING
) -> None:
    """Raise DataError at the first wanted column that is missing; ``naming`` says by name what to do then."""
    for name in wanted:
        if name not in names:
            raise DataError(
                f"{file} has no column {name!r}; it has {sorted(names)}.{did_you_mean(name, names)}"
                f"{naming.get(name, '')}"
            )


def unreadable(path: Path, error: OSError) -> DataError:
    """Return what to say of a file that the system refuses to read."""
    shown = str(path) if len(str(path)) <= 300 else f"{str(path)[:300]} …"
    return DataError(f"Cannot read {shown}: {error.strerror or error}. Check the path and its rights.")


def advice(value: object) -> str:
    """Return what to do about a value that is no number."""
    if value is None or value == "":
        return " Drop such rows or fill in a number."
    if str(value).lower() in ("true", "false"):
        return " Write truth values as 1 and 0, in pandas by .astype(int)."
    day = isinstance(value, datetime.date) or (isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value))
    return DATES if day else ""


def damaged_parquet(path: Path, error: Exception) -> DataError:
    """Return what to say of a Parquet file that pyarrow cannot read."""
    return DataError(f"{path} is truncated or no Parquet file: {first_line(error)} Fetch it again.")


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    r"""Yield (number from 1, line without its end) of a text file, gzipped if it ends in ``.gz``.

    Lines end at ``\n`` or ``\r\n`` alone: other separators of Unicode may stand inside a text. A mark of the byte order
    before the first line is left out.
    """
    existing(path)
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while raw := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(raw) > LONGEST_LINE:
                    raise DataError(
                        f"{path}, line {number}: longer than {LONGEST_LINE >> 20} MiB. Is it a file of lines?"
                    )
                line = raw.decode(encoding).rstrip("\r\n")
                yield number, line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: not {encoding} text ({error.reason} at byte {error.start}). Save the file as "
            f"{encoding.upper()}."
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is truncated or no gzip file: it breaks off after line {number} ({error}). Fetch it again."
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if number == 0:
        raise DataError(f"The data file {path} holds no line. Fetch it again.")


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a file with one JSON object a line; blank lines are skipped."""
    found = False
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            entry = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            raise DataError(
                f"{path}, line {number}: not JSON ({reason}). One object a line is wanted."
            ) from error
        if not isinstance(entry, dict):
            raise DataError(f"{path}, line {number}: wanted a JSON object; got {type(entry).__name__}.")
        found = True
        yield number, entry
    if not found:
        raise DataError(f"The data file {path} holds no line. Fetch it again.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, or raise ValueError where it has a name twice: the first value would be lost."""
    entry = dict(pairs)
    if len(entry) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"it has {shown(twice)} twice")
    return entry
