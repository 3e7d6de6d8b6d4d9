"""Opening data files: every failure becomes a DataError that names the file, the line and the way out."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib.util
import io
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, cast

from fedkeep.core.errors import DataError, Spot, did_you_mean, near_path, raising, shown, some_of
from fedkeep.core.files import expanded

LATIN = "cp1252"
FEW = 5
"""Columns that nothing names, as many of which a message shows."""
LONGEST_LINE = 1 << 26  # bytes; a gzipped file of a megabyte may hold a line of a gigabyte


def existing(path: Path, *, key: str = "") -> Path:
    """Return the path of a file that exists and isn't empty; ``key``: in a configuration it stands there, as a user wrote it."""
    with readable(path):  # a name that is too long, a folder that may not be entered
        if not path.is_file():
            where = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
            raise DataError(
                "Wanted the data file {file}, which {where}. {advice}",
                file=path,
                where=where,
                advice=_to_find(path, key) if key else "Check the path.",
            )
        if path.stat().st_size == 0:
            raise DataError("The data file {file} is empty. Fetch it again.", file=path)
    return path


def _to_find(path: Path, key: str) -> str:
    """Return what to do about a file that a user named."""
    near = "" if path.exists() else near_path(path).strip()
    return near or f"Check the path; in a configuration it is {key}."


def naming_of(columns: Mapping[str, str | Sequence[str] | None], *, frame: bool = False) -> dict[str, str]:
    """Return by a column's name what to do where it is missing.

    Args:
        columns: by argument the names that it gives, or None.
        frame: whether they are a data frame's, which no configuration names.
    """
    found: dict[str, str] = {}
    place = "" if frame else " (an argument, or under [data])"
    for argument, given in columns.items():
        several = argument == "features" or not isinstance(given, str | None)
        form = f"{argument} = {'[{0}, ...]' if several else '{0}'}".format("'COLUMN'")
        numbers = ", or of numbers features = ['COLUMN', ...]" if argument == "text" else ""
        advice = f" Say which one it is: {form}{place}{numbers}."
        found |= dict.fromkeys([given] if isinstance(given, str) else given or (), advice)
    return found


def check_names(
    file: object,
    names: Collection[str],
    wanted: Sequence[str],
    naming: Mapping[str, str] = {},
    usual: Collection[str] = (),
) -> None:
    """Raise DataError at the first wanted column that is missing; ``naming`` says by name what to do then, and ``usual``
    are columns that are read where they are there.
    """
    for name in wanted:
        if name not in names:
            raise DataError(
                "{file} has no column {column!r}; it has {there}.{near}{advice}{free}",
                file=file,
                column=name,
                there=sorted(names),
                near=(near := did_you_mean(name, names)),
                advice=naming.get(name, ""),
                free="" if near or name not in naming else _unused(sorted({*names} - {*wanted, *usual})),
            )


def _unused(names: Sequence[str]) -> str:
    """Return what to say of the columns that nothing names, of which one may be meant; empty where there are none, or many."""
    return f" Not used: {some_of(names, FEW)}." if 0 < len(names) <= FEW else ""


def readable(path: Path) -> AbstractContextManager[None]:
    """Say which file it is that the system refuses to read."""
    file = str(path) if len(str(path)) <= 300 else f"{str(path)[:300]} …"
    return raising(DataError, "Cannot read {file}: {why}. Check the path and its rights.", OSError, file=file)


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with readable(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(folder: Path, files: Iterable[Path]) -> str:
    """Return one sha256 of many files of a folder: of their names in it, and of what each holds."""
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(f"{file.relative_to(folder).as_posix()}\0{sha256(file)}\n".encode())
    return whole.hexdigest()


def opened(path: Path) -> IO[bytes]:
    """Open a file of bytes, gzipped if it ends in ``.gz``."""
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def encoding_of(path: Path) -> str:
    """Return how the beginning of a text file is encoded: "utf-8", "utf-16", "utf-16-le", "utf-16-be" or "cp1252".

    UTF-16 is known by its mark, or by the zeros that it makes of Latin letters; what is no UTF-8 is Windows' Latin-1.
    """
    try:
        with opened(existing(path)) as file:
            head = file.read(1 << 16)
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError):
        return "utf-8"  # whoever reads on says what is wrong
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd = head[:200:2].count(0), head[1:200:2].count(0)
    if max(even, odd) > 2 * max(1, min(even, odd)) and max(even, odd) > len(head[:200]) // 4:
        return "utf-16-be" if even > odd else "utf-16-le"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return "utf-8" if 0 in head else LATIN
    return "utf-8"


def lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    r"""Yield (number from 1, line without its end) of a text file, gzipped if it ends in ``.gz``.

    Lines end at ``\n`` or ``\r\n`` alone: other separators of Unicode may stand inside a text. A mark of the byte order
    before the first line is left out.
    """
    existing(path)
    number = 0
    with readable(path):
        try:
            with opened(path) as file:
                if encoding.startswith("utf-16"):  # in which a line's end is no single byte
                    file, encoding = io.BytesIO(file.read().decode(encoding).encode()), "utf-8"
                while raw := file.readline(LONGEST_LINE + 1):
                    number += 1
                    if len(raw) > LONGEST_LINE:
                        raise DataError(
                            "{place}: longer than {most} MiB. Is it a file of lines?",
                            place=Spot(path, number),
                            most=LONGEST_LINE >> 20,
                        )
                    line = raw.decode(encoding, "replace" if encoding == LATIN else "strict").rstrip("\r\n")
                    yield number, line.removeprefix("\ufeff") if number == 1 else line
        except UnicodeDecodeError as error:
            raise DataError(
                "{place}: not {encoding} text ({why} at byte {start}). Save the file in this encoding.",
                place=Spot(path, number),
                encoding=encoding.upper(),
                why=error.reason,
                start=error.start,
            ) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                "{file} is truncated or no gzip file: it breaks off after line {number} ({error}). Fetch it "
                "again.",
                file=path,
                number=number,
                error=error,
            ) from error
    if number == 0:
        raise without_lines(path)


def without_lines(path: Path) -> DataError:
    """Return what to say of a file that holds no line."""
    return DataError("The data file {file} holds no line. Fetch it again.", file=path)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a file with one JSON object a line; blank lines are skipped."""
    found = False
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            entry = json.loads(line, object_pairs_hook=object_of)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            raise DataError(
                "{place}: not JSON ({reason}). One object a line is wanted.",
                place=Spot(path, number),
                reason=reason,
            ) from error
        if not isinstance(entry, dict):
            raise DataError(
                "{place}: wanted a JSON object; got {got}.",
                place=Spot(path, number),
                got=type(entry).__name__,
            )
        found = True
        yield number, entry
    if not found:
        raise without_lines(path)


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, or raise ValueError where it has a name twice: the first value would be lost."""
    entry = dict(pairs)
    if len(entry) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"it has {shown(twice)} twice")
    return entry


def inside(package: str, path: str, install: str, folder: str | Path | None = None) -> Path:
    """Return where a Python package keeps its data; the package is found, and not imported.

    Args:
        package: its name in Python.
        path: of the data, inside it.
        install: the command that installs it, for the message.
        folder: of packages, as ``pip install --target FOLDER`` makes it; None: where Python finds them.

    Raises:
        DataError: the package is not there, or holds no such data.
    """
    if folder is not None:
        places = [expanded(folder) / package]
    else:
        spec = importlib.util.find_spec(package)
        places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    found = [place / path for place in places if (place / path).exists()]
    if found:
        return found[0]
    where = "Python finds none" if folder is None else f"there is none in {folder}"
    if any(place.is_dir() for place in places):
        where = f"the one in {places[0].parent} has no {path}"
    raise DataError(
        "These data are inside the package {package}; {where}. Install it: {install}",
        package=package,
        where=where,
        install=install,
    )
