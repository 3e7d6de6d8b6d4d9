"""Folders with a table for each client, or for each client and split, as one table."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from fedkeep.core.errors import DataError, raising
from fedkeep.data.readers.cells import ALIASES, Cells, Only, RawTable
from fedkeep.data.readers.load_table import FORMATS, load_table
from fedkeep.data.readers.opened_files import readable

WILD = "*?["


def is_of_many(place: Path) -> bool:
    """Tell whether a place is a folder, or a pattern such as ``logs/*.csv``."""
    wild = any(mark in str(place) for mark in WILD)
    return os.path.isdir(place) or (wild and not os.path.exists(place))  # False where a name is too long


def files_of(place: Path, what: str = "table", formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """Return the files of these formats in a folder, or those that a pattern finds, in the order of their names; no hidden ones."""
    if os.path.isdir(place):
        within, pattern = place, "*"
    else:
        parts = place.parts
        first = next((n for n, part in enumerate(parts) if any(mark in part for mark in WILD)), len(parts))
        within = Path(*parts[:first])
        if first == len(parts):
            raise DataError(
                "Wanted a folder with a {what} for each client; {folder} is none.", what=what, folder=place
            )
        pattern = "/".join(parts[first:])
    # It may not be read
    with (
        raising(DataError, "{folder} is no pattern of files: {why}.", ValueError, folder=place),
        readable(within),
    ):
        files = sorted(
            p for p in within.glob(pattern) if p.name.endswith(formats) and not p.name.startswith(".")
        )
    if not files:
        raise DataError(
            "{folder} holds no {what}. Wanted one for each client that ends in one of {FORMATS}.",
            folder=place,
            what=what,
            FORMATS=", ".join(formats),
        )
    return files


def named(file: Path, formats: tuple[str, ...] = FORMATS) -> tuple[str, str | None]:
    """Return the client that a file's name tells, and its split where it tells one: ``ann.train.csv``."""
    name = next(file.name.removesuffix(suffix) for suffix in formats if file.name.endswith(suffix))
    client, dot, part = name.rpartition(".")
    return (client, ALIASES[part]) if dot and part in ALIASES else (name, None)


def check_once(files: Sequence[Path], formats: tuple[str, ...] = FORMATS) -> None:
    """Refuse two files of the same client and split, such as a file and its ``.gz``: each row would come twice."""
    first: dict[tuple[str, str | None], Path] = {}
    for file in files:
        who = named(file, formats)
        if other := first.get(who):
            raise DataError(
                "{other} and {name} are both the {part} file of client {client!r}. Drop one of the two.",
                other=other,
                name=file.name,
                part=who[1] or "whole",
                client=who[0],
            )
        first[who] = file


def joined(tables: Sequence[RawTable]) -> RawTable:
    """Return tables of the same columns one after the other; a row keeps the name of its file and line."""
    first = tables[0]
    for table in tables:
        if other := sorted(table.columns.keys() ^ first.columns.keys()):
            raise DataError(
                "{place}: wanted a {column} in every file or in none; {other} is different.",
                place=table.where(0),
                column=other[0],
                other=first.where(0),
            )
    ends = list(accumulate(map(_rows, tables)))

    def where(row: int) -> object:
        number = bisect_right(ends, row)
        return tables[number].where(row - (ends[number - 1] if number else 0))

    columns = {name: _one_column([table.columns[name] for table in tables]) for name in first.columns}
    return RawTable(columns, where, "," if any(table.decimal == "," for table in tables) else ".")


def _rows(table: RawTable) -> int:
    return len(next(iter(table.columns.values())))


def _one_column(parts: Sequence[Cells]) -> Cells:
    """Return cells as one array of pyarrow, where all are such of one type; else as a list."""
    import pyarrow

    kinds = {None if isinstance(part.values, list) else part.values.type for part in parts}
    if len(kinds) == 1 and None not in kinds:
        chunks = [
            chunk
            for part in parts
            for chunk in (
                part.values.chunks if isinstance(part.values, pyarrow.ChunkedArray) else [part.values]
            )
        ]
        return Cells(pyarrow.chunked_array(chunks, type=kinds.pop()))
    return Cells([value for part in parts for value in part.tolist()])


def load_many(
    files: Sequence[Path],
    wanted: Sequence[str],
    optional: Sequence[str],
    client: str | None,
    split: str,
    naming: Mapping[str, str] = {},
    only: Only | None = None,
) -> RawTable:
    """Read a table for each client: its file's name is the client where no column is, and may tell the split.

    Args:
        files: the tables.
        wanted, optional: columns, as of ``load_table``.
        client, split: the names of columns that are made where the files have none; None: no client is wanted.
        naming, only: as of ``load_table``; a file that has none of these clients' rows is left out.

    Raises:
        DataError: as of ``load_table``; or a file tells its split twice, or has other columns than the first.
    """
    loose = [client] if client == "user" else []  # one that was named must be there
    named_ones = [name for name in wanted if name not in loose]
    own = [load_table(file, named_ones, [*loose, *optional], naming, only=only) for file in files]
    if only is not None:
        there = [(file, table) for file, table in zip(files, own, strict=True) if _rows(table)]
        files, own = [file for file, _ in there], [table for _, table in there]
    if client is not None and not any(client in table.columns for table in own):
        check_once(files)
    made = [_with_names(file, table, client, split) for file, table in zip(files, own, strict=True)]
    return joined(made)


def _with_names(file: Path, table: RawTable, client: str | None, split: str) -> RawTable:
    import pyarrow

    who, part = named(file)
    columns = dict(table.columns)
    if client is not None and client not in columns:
        columns[client] = Cells(pyarrow.chunked_array([pyarrow.repeat(who, _rows(table))]))
    if part is not None:
        if split in columns:
            raise split_twice(file, split)
        columns[split] = Cells(pyarrow.chunked_array([pyarrow.repeat(part, _rows(table))]))
    return RawTable(columns, table.where, table.decimal)


def split_twice(file: Path, split: str) -> DataError:
    """Return what to say of a file that tells its split in its name and in a column."""
    return DataError(
        "{file} has its split in its name and in the column {column!r}. Drop one of the two.",
        file=file,
        column=split,
    )
